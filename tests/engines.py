"""Engines for the tests of whole handoffs: their sessions, their caches, and what must be in them.

Axes of what is compared: block, token (of a block), head, dim; all as raw bits.
"""

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from kvbus.engine import DecodeSession, Fetch, KvCache, MemorySession, Offer, PrefillSession
from kvbus.errors import FetchFailed
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout, KvPart, num_blocks_for
from tests.agents import until

FULL = GroupSpec("full", (0, 1), 16, 6, 8, "bfloat16")
SMALL = GroupSpec("small", (2, 3), 4, 6, 8, "bfloat16")
LARGE = GroupSpec("full", (0,), 64, 8, 64, "bfloat16")
NUM_LARGE_BLOCKS = 512
NHD = KvLayout.parse("NHD")
NUM_BLOCKS = 64

Blocks = dict[str, list[int]]
Snapshot = dict[tuple[int, int, KvPart], Tensor]


@dataclass
class Engine:
    """One engine of a test; ``control`` is a `PrefillSession` or a `DecodeSession`."""

    spec: EngineSpec
    control: PrefillSession | DecodeSession
    caches: list[KvCache]
    num_blocks: int

    @property
    def prefill(self) -> PrefillSession:
        assert isinstance(self.control, PrefillSession)
        return self.control

    @property
    def decode(self) -> DecodeSession:
        assert isinstance(self.control, DecodeSession)
        return self.control

    def views(self) -> Snapshot:
        """The whole cache as bits, by rank, layer and part; views, not copies."""
        return {
            (rank, layer, part): bits(cache.view(layer, part))
            for rank, cache in enumerate(self.caches)
            for group in self.spec.groups
            for layer in group.layers
            for part in group.parts
        }

    def fill(self, seed: int) -> None:
        """Random bits everywhere, NaNs included."""
        generator = torch.Generator().manual_seed(seed)
        for view in self.views().values():
            view.random_(-(2**15), 2**15, generator=generator)

    def snapshot(self) -> Snapshot:
        """A copy of the whole cache."""
        return {key: view.clone() for key, view in self.views().items()}

    def some_blocks(self, seed: int, num_tokens: int, first_token: int = 0) -> Blocks:
        """Blocks for the tokens of every group, in random order."""
        chosen = {}
        for number, group in enumerate(self.spec.groups):
            size = group.block_size
            empty = num_tokens <= first_token
            needed = 0 if empty else num_blocks_for(num_tokens, size) - first_token // size
            order = Random(seed + number)
            chosen[group.name] = order.sample(range(self.num_blocks), needed)
        return chosen


def bits(view: Tensor) -> Tensor:
    """The same memory as integers of two bytes."""
    return view.view(torch.int16)


def expected_after(
    before: Snapshot,
    source: Engine,
    source_blocks: Blocks,
    target: Engine,
    target_blocks: Blocks,
    *,
    num_tokens: int,
    first_token: int = 0,
) -> Snapshot:
    """``before`` with tokens [first_token, num_tokens) of ``source``, written slot by slot."""
    expected = {key: tensor.clone() for key, tensor in before.items()}
    views = source.views()
    for group in target.spec.groups:
        size = group.block_size
        positions = torch.arange(first_token, num_tokens)
        theirs = torch.tensor(source_blocks[group.name], dtype=torch.int64)
        ours = torch.tensor(target_blocks[group.name], dtype=torch.int64)
        if not len(positions):
            continue
        read = theirs[positions // size], positions % size
        written = ours[positions // size - first_token // size], positions % size
        for (rank, layer, part), tensor in expected.items():
            if layer in group.layers:
                tensor[written] = views[rank, layer, part][read]
    return expected


def same(one: Snapshot, other: Snapshot) -> bool:
    """Whether every bit of two caches is equal."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def make_spec(
    *, tp: int = 1, groups: Sequence[GroupSpec] = (FULL,), engine_id: str = "", model: str = "m"
) -> EngineSpec:
    """An engine of a fresh id, so that agents can be shared by tests."""
    return EngineSpec(engine_id or uuid.uuid4().hex, model, tp, tuple(groups))


@asynccontextmanager
async def engine(
    kind: type[PrefillSession] | type[DecodeSession],
    attach: Path,
    spec: EngineSpec | None = None,
    *,
    layout: KvLayout = NHD,
    num_blocks: int = NUM_BLOCKS,
    seed: int = 0,
) -> AsyncIterator[Engine]:
    """A registered engine, all of its sessions in this process, its cache full of random bits."""
    spec = spec or make_spec()
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(kind(attach, spec))
        memories = [
            await stack.enter_async_context(MemorySession(attach, spec, rank))
            for rank in range(spec.tp_size)
        ]
        caches = [await memory.allocate(layout, num_blocks=num_blocks) for memory in memories]
        await control.register()
        await control.ready()
        made = Engine(spec, control, caches, num_blocks)
        if seed:
            made.fill(seed)
        yield made


@asynccontextmanager
async def pair(
    prefill_attach: Path,
    decode_attach: Path,
    *,
    tp: int = 1,
    groups: Sequence[GroupSpec] = (FULL,),
    layout: KvLayout = NHD,
    num_blocks: int = NUM_BLOCKS,
) -> AsyncIterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine that fit, with different contents."""
    specs = [make_spec(tp=tp, groups=groups) for _ in range(2)]
    shape = {"layout": layout, "num_blocks": num_blocks}
    async with (
        engine(PrefillSession, prefill_attach, specs[0], seed=1, **shape) as source,
        engine(DecodeSession, decode_attach, specs[1], seed=2, **shape) as target,
    ):
        yield source, target


async def works(source: Engine, target: Engine, num_tokens: int = 40) -> bool:
    """Whether a whole handoff gives the right bits: the agents have got over what was before."""
    theirs, ours = source.some_blocks(3, num_tokens), target.some_blocks(4, num_tokens)
    wanted = expected_after(target.snapshot(), source, theirs, target, ours, num_tokens=num_tokens)
    offer = await source.prefill.offer(uuid.uuid4().hex, num_tokens=num_tokens, block_ids=theirs)
    fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours)
    await fetch.completed()
    await offer.released()
    return same(target.snapshot(), wanted)


async def failure_of(fetch: Fetch) -> FetchFailed:
    """How a fetch that must fail did."""
    with pytest.raises(FetchFailed) as failed:
        await fetch.completed()
    return failed.value


async def start_long_read(
    source: Engine, target: Engine, *, timeout_s: float | None = None
) -> tuple[Offer, Fetch]:
    """A handoff of 64 MiB of which the first bytes have landed; the source holds random bits."""
    num_tokens = NUM_LARGE_BLOCKS * LARGE.block_size
    theirs, ours = source.some_blocks(5, num_tokens), target.some_blocks(6, num_tokens)
    first = target.views()[0, 0, KvPart.KEY][min(ours["full"])]
    before = first.clone()
    offer = await source.prefill.offer(uuid.uuid4().hex, num_tokens=num_tokens, block_ids=theirs)
    fetch = target.decode.fetch(
        offer.ticket, num_tokens=num_tokens, block_ids=ours, timeout_s=timeout_s
    )
    await until(lambda: not torch.equal(first, before))
    return offer, fetch
