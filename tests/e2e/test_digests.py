"""What was read is compared with what the prefill engine has: a flipped bit fails the fetch."""

import re
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvbus.agent.process.runtime import Runtime
from kvbus.errors import ErrorCode, FetchFailed
from kvbus.geometry import Box, GroupSpec
from kvbus.planning import chosen_pieces, num_pieces, piece_of
from kvbus.protocol import Digests, HandshakeDone
from kvbus_decode.read import events as ev
from kvbus_prefill import digests as digest_server
from kvbus_prefill import handshake
from tests.agents import until
from tests.decode.inside import decode_agent
from tests.e2e.shapes import GROUP, PATHS, SLOT_BYTES, ShapedAgents, Side, hand_over, two_engines
from tests.e2e.test_shapes import GROUPS, HND, LATENT, NHD
from tests.engines import Engine, same
from tests.examples import num_examples
from tests.expected import num_pieces_compared, positions
from tests.memories import Memory
from tests.prefill.inside import PrefillAgent, given_back, prefill_agent

pytestmark = pytest.mark.anyio

SLOTS = {"slot_bytes": SLOT_BYTES, "staging_bytes": 4 * SLOT_BYTES}
SHAPES: dict[str, tuple[Side, Side, Sequence[GroupSpec]]] = {
    "all_groups": (Side(tp=2), Side(tp=3, memory=Memory(HND)), GROUPS),
    "blocks": (
        Side(block_size=48, memory=Memory(HND, padding=2)),
        Side(block_size=5, memory=Memory(NHD, apart=True)),
        (GROUP,),
    ),
    "latent": (Side(tp=2), Side(tp=4), (LATENT,)),
}
NUM_FLIPS = num_examples(24)
"""For each path and shape; `tests/memory/test_digest_pieces.py` flips thousands, in any memory."""
NUM_TOKENS, MAX_TOKENS = 71, 400


@dataclass(frozen=True)
class Flip:
    """One bit of what one rank of the decode engine has been given."""

    rank: int
    layer: int
    part: str
    head: int
    token: int
    dim: int
    bit: int

    def apply(self, engine: Engine, blocks: Any, first_token: int, num_tokens: int) -> None:
        group = group_of(engine, self.layer)
        row, slot = divmod(self.token, group.block_size)
        first = positions(group, first_token, num_tokens)[0] // group.block_size
        heads = engine.heads(self.rank, self.layer, self.part)
        view = engine.views()[self.rank, self.layer, self.part]
        at = (blocks[group.name][row - first], slot, heads.index(self.head), self.dim)
        width = 8 * view.element_size()
        is_sign = view.dtype.is_signed and self.bit == width - 1
        view[at] = view[at] ^ ((1 << self.bit) - (1 << width) * is_sign)

    def is_named(self, message: str) -> bool:
        named = re.search(
            r"^rank (\d+) has .* layer (\d+), '(\w+)', head (\d+), tokens (\d+) to (\d+); 1 of ",
            message,
        )
        assert named is not None, message
        rank, layer, part, head, start, stop = named.groups()
        piece = (int(rank), int(layer), part, int(head))
        is_there = int(start) <= self.token < int(stop) <= int(start) // 16 * 16 + 16
        return is_there and piece == (self.rank, self.layer, self.part, self.head)


def group_of(engine: Engine, layer: int) -> GroupSpec:
    (group,) = (group for group in engine.spec.groups if layer in group.layers)
    return group


def draw_flip(random: Random, engine: Engine, first_token: int, num_tokens: int) -> Flip:
    views = engine.views()
    rank, layer, part = random.choice(list(views))
    view = views[rank, layer, part]
    held = positions(group_of(engine, layer), first_token, num_tokens)
    return Flip(
        rank=rank,
        layer=layer,
        part=part,
        head=random.choice(engine.heads(rank, layer, part)),
        token=random.choice(held),
        dim=random.randrange(view.shape[3]),
        bit=random.randrange(8 * view.element_size()),
    )


@asynccontextmanager
async def reader_at(folder: Path, path: str, **settings: Any) -> AsyncIterator[Runtime]:
    """A decode agent inside, so that a test can come in between landing and comparing."""
    settings = {"digest": "full", **SLOTS, "path": path, **settings}
    async with decode_agent(folder, mapped=path == "mapped", **settings) as runtime:
        yield runtime


class Handoff:
    """One offer and one fetch of it; a bit is flipped when all has landed, before we compare."""

    def __init__(self, runtime: Runtime, source: Engine, target: Engine) -> None:
        self.source, self.target = source, target
        self.commands = runtime.service._reader._driver.commands

    async def run(
        self,
        flip: Flip | Callable[[str], Flip] | None,
        num_tokens: int = NUM_TOKENS,
        first_token: int = 0,
    ) -> FetchFailed | None:
        theirs = self.source.whole_blocks(5, num_tokens)
        ours = self.target.some_blocks(6, num_tokens, first_token)
        compare = self.commands[ev.StartCompare]
        left = [flip] if flip is not None else []

        def flip_first(command: ev.StartCompare) -> None:
            while left:
                known = left.pop()
                chosen = known(command.leg.work.chunk.offer_id) if callable(known) else known
                chosen.apply(self.target, ours, first_token, num_tokens)
            compare(command)

        self.commands[ev.StartCompare] = flip_first
        try:
            offer = await self.source.prefill.offer(
                uuid.uuid4().hex, num_tokens=num_tokens, block_ids=theirs
            )
            fetch = self.target.decode.fetch(
                offer.ticket, num_tokens=num_tokens, block_ids=ours, first_token=first_token
            )
            failed: FetchFailed | None = None
            try:
                await fetch.completed()
            except FetchFailed as error:
                failed = error
                await offer.withdraw()
            await offer.released()
        finally:
            self.commands[ev.StartCompare] = compare
        assert not left, "nothing was compared"
        return failed


@asynccontextmanager
async def two_engines_at(
    prefill: Any, runtime: Runtime, path: str, name: str
) -> AsyncIterator[tuple[Engine, Engine]]:
    """Engines of a shape, at a prefill agent and at the decode agent inside.

    Until their memory is given back by agents inside.
    """
    *sides, groups = SHAPES[name]
    agents = ShapedAgents(prefill, {path: SimpleNamespace(attach=runtime.config.attach_path)})
    inside = [runtime, *([prefill.runtime] if isinstance(prefill, PrefillAgent) else [])]
    async with two_engines(agents, path, *sides, groups=groups, max_tokens=MAX_TOKENS) as pair:
        engines = [one for each in inside for one in each.agent.engines.engines.values()]
        processes = [process for one in engines for process in one.processes]
        yield pair
    await until(lambda: all(given_back(process) for process in processes))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("path", PATHS)
async def test_a_bit_that_is_flipped_after_landing_is_found_and_located(shapes, folder, path, name):
    random = Random(f"{path} {name}")
    async with (
        reader_at(folder, path) as runtime,
        two_engines_at(shapes.prefill, runtime, path, name) as (source, target),
    ):
        handoff = Handoff(runtime, source, target)
        assert await handoff.run(None) is None
        for _ in range(NUM_FLIPS):
            first_token = random.randrange(NUM_TOKENS)
            flip = draw_flip(random, target, first_token, NUM_TOKENS)
            failed = await handoff.run(flip, first_token=first_token)

            assert failed is not None, flip
            assert failed.code is ErrorCode.DIGEST_MISMATCH
            assert flip.is_named(failed.message), (flip, failed.message)


def compared(runtime: Runtime, outcome: str) -> float:
    registry = runtime.agent.metrics.registry
    return registry.get_sample_value("kvbus_digests_total", {"outcome": outcome}) or 0.0


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("path", PATHS)
async def test_all_that_is_handed_over_is_compared_on_each_path(shapes, folder, path, name):
    async with (
        reader_at(folder, path) as runtime,
        two_engines_at(shapes.prefill, runtime, path, name) as (source, target),
    ):
        fetched = await hand_over(source, target, NUM_TOKENS, first_token=9, zero_tail=True)

        assert fetched.path == path
        assert compared(runtime, "equal") == num_pieces_compared(source, target, NUM_TOKENS, 9)
        assert compared(runtime, "different") == 0


async def test_nothing_is_compared_unless_it_is_switched_on(shapes, folder):
    async with (
        reader_at(folder, "direct", digest="off") as runtime,
        two_engines_at(shapes.prefill, runtime, "direct", "blocks") as (source, target),
    ):
        await hand_over(source, target, NUM_TOKENS)

        assert compared(runtime, "equal") == 0


@pytest.mark.parametrize("is_sampled", [True, False])
async def test_of_a_sample_flipped_bits_are_found_and_others_are_not_looked_at(
    shapes, folder, is_sampled
):
    box = Box("full", GROUP.layers, GROUP.parts, 0, GROUP.num_kv_heads, 0, MAX_TOKENS)

    def flip(offer_id: str) -> Flip:
        chosen = set(chosen_pieces(box, offer_id=offer_id, one_in=64).tolist())
        pieces = chosen if is_sampled else set(range(num_pieces(box))) - chosen
        piece = piece_of(box, min(pieces))
        return Flip(0, piece.layer, piece.part, piece.head, piece.start, 1, 4)

    async with (
        reader_at(folder, "mapped", digest="sampled") as runtime,
        two_engines_at(shapes.prefill, runtime, "mapped", "blocks") as (source, target),
    ):
        failed = await Handoff(runtime, source, target).run(flip, MAX_TOKENS)

        assert (failed is not None) == is_sampled
        assert failed is None or failed.code is ErrorCode.DIGEST_MISMATCH
        assert compared(runtime, "different") == is_sampled


def of_an_older_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(**fields: Any) -> HandshakeDone:
        return HandshakeDone(**{**fields, "digests": False})

    monkeypatch.setattr(handshake, "HandshakeDone", older)


def too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_less(*, digests: bytes) -> Digests:
        return Digests(digests=digests[8:])

    monkeypatch.setattr(digest_server, "Digests", one_less)


@pytest.mark.parametrize(
    ("answers", "code", "words"),
    [
        (of_an_older_agent, ErrorCode.INCOMPATIBLE, "run a newer kvbus there"),
        (too_few, ErrorCode.INVALID, r"told \d+ digests, \d+ pieces are compared"),
    ],
)
async def test_a_prefill_agent_that_does_not_tell_the_digests_proves_nothing(
    folder, monkeypatch, answers, code, words
):
    answers(monkeypatch)
    (folder / "p").mkdir(mode=0o700)
    async with (
        prefill_agent(folder / "p") as prefill,
        reader_at(folder, "direct") as runtime,
        two_engines_at(prefill, runtime, "direct", "blocks") as (source, target),
    ):
        before = target.snapshot()
        failed = await Handoff(runtime, source, target).run(None)

        assert failed is not None
        assert failed.code is code
        assert re.search(words, failed.message)
        assert code is ErrorCode.INVALID or same(target.snapshot(), before), "nothing was read"
