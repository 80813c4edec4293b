"""One READ that is copied to several ranks: whatever ends between two of the copies.

The agent's only copy thread is held up, with the box read and the first rank written: so each end
comes at the worst moment. The sessions of the engines write over blocks that are released, and see
whether anything lands in those that are free. How it ends by each path is in `tests/process`.
"""

import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbus.engine import DecodeSession, Fetch, Offer, PrefillSession
from kvbus.errors import ErrorCode
from kvbus.geometry import GroupSpec, KvPart
from kvbus.memory import copying
from kvbus.protocol import Outcome
from tests.agents import WITHIN_S, until
from tests.decode.neighbours import Neighbours, neighbours
from tests.engines import Engine, Snapshot, engine, failure_of, make_spec, same, works
from tests.expected import expected_after
from tests.prefill.inside import given_back

pytestmark = pytest.mark.anyio

LATENT = GroupSpec("latent", (0, 1), 16, 1, 32, "bfloat16", (KvPart.LATENT,))
NUM_RANKS, NUM_TOKENS = 4, 40
ENDS = (ErrorCode.ENGINE_LOST, ErrorCode.STALE, ErrorCode.OFFER_WITHDRAWN)


@dataclass
class Halfway:
    """A handoff of which one rank has its bytes; the thread that copies waits for the gate."""

    both: Neighbours
    source: Engine
    target: Engine
    last: AsyncExitStack
    gate: threading.Event = field(default_factory=threading.Event)
    offer: Offer = field(init=False)
    fetch: Fetch = field(init=False)
    wanted: Snapshot = field(init=False)
    before: Snapshot = field(init=False)

    async def begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Returns when the first copy is done and the second is about to be."""
        assert await works(self.source, self.target)
        copies, theirs = list[int](), self.source.some_blocks(5, NUM_TOKENS)
        ours, self.before = self.target.some_blocks(6, NUM_TOKENS), self.target.snapshot()

        def held_scatter(*args: Any) -> None:
            copies.append(1)
            assert len(copies) < 2 or self.gate.wait(2 * WITHIN_S)
            scatter(*args)

        scatter = copying.scatter
        monkeypatch.setattr(copying, "scatter", held_scatter)
        self.wanted = expected_after(
            self.before, self.source, theirs, self.target, ours, num_tokens=NUM_TOKENS
        )
        self.offer = await self.source.prefill.offer("r", num_tokens=NUM_TOKENS, block_ids=theirs)
        self.fetch = self.target.decode.fetch(
            self.offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours
        )
        await until(lambda: len(copies) == 2)

    @property
    def num_slots(self) -> int:
        return self.both.service.counts()["slots"]

    def ranks_written(self) -> list[int]:
        """Ranks that have all of their bytes; the others have none."""
        now = self.target.snapshot()
        written = [rank for rank in now if torch.equal(now[rank], self.wanted[rank])]
        others = [rank for rank in now if torch.equal(now[rank], self.before[rank])]
        assert sorted(written + others) == list(range(NUM_RANKS))
        return written


@asynccontextmanager
async def open_engine(both: Neighbours, role: str) -> AsyncIterator[Engine]:
    """Of one rank, or of some that all hold the same."""
    attach = both.prefill.attach if role == "prefill" else both.decode.config.attach_path
    kind = PrefillSession if role == "prefill" else DecodeSession
    spec = make_spec(tp=1 if role == "prefill" else NUM_RANKS, groups=(LATENT,))
    async with engine(kind, attach, spec, seed=len(role)) as made:
        yield made


@pytest.fixture
async def half(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Halfway]:
    """The engine that the test has leave, or the decode engine, is opened last."""
    settings = {"path": "packed", "mapped": False, "copy_threads": 1}
    async with (
        neighbours(folder, decode=settings) as both,
        AsyncExitStack() as first,
        AsyncExitStack() as last,
    ):
        roles = getattr(request, "param", ("prefill", "decode"))
        engines = {
            role: await stack.enter_async_context(open_engine(both, role))
            for role, stack in zip(roles, (first, last), strict=True)
        }
        processes = both.processes()
        halfway = Halfway(both, engines["prefill"], engines["decode"], last)
        try:
            await halfway.begin(monkeypatch)
            yield halfway
        finally:
            halfway.gate.set()
        await last.aclose()
        await first.aclose()
        await until(lambda: not halfway.num_slots and all(map(given_back, processes)))


async def test_the_slot_stays_until_the_last_rank_is_written(half: Halfway) -> None:
    written, in_use = half.ranks_written(), half.num_slots
    half.gate.set()
    fetched = await half.fetch.completed()

    assert (len(written), in_use) == (1, 1)
    assert same(half.target.snapshot(), half.wanted)
    assert fetched.num_bytes == NUM_TOKENS * 2 * 32 * 2  # layers, dims, bytes: one copy


async def test_a_fetch_cancelled_between_copies_writes_no_rank_but_the_one_under_way(
    half: Halfway,
) -> None:
    written = half.ranks_written()
    await half.fetch.cancel()
    failure, in_use = await failure_of(half.fetch), half.num_slots
    half.gate.set()
    await half.fetch.blocks_freed()

    assert (failure.code, failure.blocks_free) == (ErrorCode.CANCELLED, False)
    assert (in_use, half.num_slots) == (1, 0)
    assert (len(written), len(half.ranks_written())) == (1, 2)
    await half.offer.withdraw()
    assert await works(half.source, half.target)


async def test_an_offer_withdrawn_between_copies_is_released_and_never_completed(
    half: Halfway,
) -> None:
    await half.offer.withdraw()
    outcome = await half.offer.released()
    half.gate.set()
    failure = await failure_of(half.fetch)
    await half.fetch.blocks_freed()

    assert (outcome, failure.code) == (Outcome.WITHDRAWN, ErrorCode.OFFER_WITHDRAWN)
    assert await works(half.source, half.target)


@pytest.mark.parametrize("half", [("decode", "prefill")], indirect=True)
async def test_a_prefill_engine_that_ends_between_copies_fails_the_fetch(half: Halfway) -> None:
    await half.last.aclose()
    half.gate.set()
    failure = await failure_of(half.fetch)
    await half.fetch.blocks_freed()

    assert failure.code in ENDS
    async with open_engine(half.both, "prefill") as another:
        assert await works(another, half.target)


async def test_the_memory_of_a_decode_engine_that_ends_between_copies_stays_until_they_end(
    half: Halfway,
) -> None:
    agent = half.both.decode.agent
    processes = [one for known in agent.engines.engines.values() for one in known.processes]
    await half.last.aclose()
    await until(lambda: not agent.engines.engines)
    kept = [given_back(process) for process in processes]
    half.gate.set()
    await until(lambda: all(map(given_back, processes)))

    assert not all(kept)
    await half.offer.withdraw()
    async with open_engine(half.both, "decode") as another:
        assert await works(half.source, another)
