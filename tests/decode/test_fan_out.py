"""One READ that is copied to several ranks: whatever ends between two of the copies.

The agent's only copy thread is held up, with the box read and the first rank written: so each end
comes at the worst moment. How it ends by each path is in `tests/process`.
"""

import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbus.engine import Fetch, Offer
from kvbus.errors import ErrorCode
from kvbus.geometry import GroupSpec, KvPart
from kvbus.memory import copying
from tests.agents import WITHIN_S, until
from tests.decode.neighbours import Neighbours, begin, neighbours
from tests.engines import Engine, Snapshot, engine, failure_of, make_spec, same, works
from tests.expected import expected_after
from tests.prefill.inside import given_back

pytestmark = pytest.mark.anyio

LATENT = GroupSpec("latent", (0, 1), 16, 1, 32, "bfloat16", (KvPart.LATENT,))
NUM_RANKS, NUM_TOKENS = 4, 40


@dataclass
class Halfway:
    """A handoff of which one rank has its bytes; the thread that copies waits for the gate."""

    both: Neighbours
    source: Engine
    target: Engine
    leave: AsyncExitStack
    """Closed, it ends the decode engine."""
    gate: threading.Event
    offer: Offer
    fetch: Fetch
    before: Snapshot
    wanted: Snapshot

    @property
    def num_slots(self) -> int:
        return self.both.service.counts()["slots"]

    def num_written(self) -> int:
        """How many ranks have all of their bytes; the others have none."""
        now = self.target.snapshot()
        written = [rank for rank in now if torch.equal(now[rank], self.wanted[rank])]
        others = [rank for rank in now if torch.equal(now[rank], self.before[rank])]
        assert sorted(written + others) == list(range(NUM_RANKS))
        return len(written)


@pytest.fixture
async def half(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Halfway]:
    """The first copy is done and the second is about to be."""
    gate, copies, scatter = threading.Event(), list[int](), copying.scatter

    def held_scatter(*args: Any) -> None:
        copies.append(1)
        assert len(copies) < 2 or gate.wait(2 * WITHIN_S)
        scatter(*args)

    spec = make_spec(tp=NUM_RANKS, groups=(LATENT,))
    settings = {"path": "packed", "mapped": False, "copy_threads": 1}
    async with neighbours(folder, decode=settings) as both:
        theirs, ours = both.prefill.attach, both.decode.config.attach_path
        prefill = engine(theirs, make_spec(groups=(LATENT,)), seed=1)
        async with prefill as source, AsyncExitStack() as leave:
            target = await leave.enter_async_context(engine(ours, spec, seed=2))
            processes = both.processes()
            assert await works(source, target)
            before = target.snapshot()
            read, written = source.some_blocks(3, NUM_TOKENS), target.some_blocks(4, NUM_TOKENS)
            wanted = expected_after(before, source, read, target, written, num_tokens=NUM_TOKENS)
            monkeypatch.setattr(copying, "scatter", held_scatter)
            offer, fetch = await begin(source, target, NUM_TOKENS)
            await until(lambda: len(copies) == 2)
            halfway = Halfway(both, source, target, leave, gate, offer, fetch, before, wanted)
            try:
                yield halfway
            finally:
                gate.set()
        await until(lambda: not halfway.num_slots and all(map(given_back, processes)))


async def test_the_slot_stays_until_the_last_rank_is_written(half: Halfway) -> None:
    num_written, in_use = half.num_written(), half.num_slots
    half.gate.set()
    fetched = await half.fetch.ended

    assert (num_written, in_use) == (1, 1)
    assert same(half.target.snapshot(), half.wanted)
    assert fetched.num_bytes == NUM_TOKENS * 2 * 32 * 2  # layers, dims, bytes: one copy


async def test_a_fetch_cancelled_between_copies_writes_no_rank_but_the_one_under_way(
    half: Halfway,
) -> None:
    num_written = half.num_written()
    await half.fetch.cancel()
    failure, in_use = await failure_of(half.fetch), half.num_slots
    half.gate.set()
    await half.fetch.freed

    assert (failure.code, failure.blocks_free) == (ErrorCode.CANCELLED, False)
    assert (in_use, half.num_slots) == (1, 0)
    assert (num_written, half.num_written()) == (1, 2)
    await half.offer.withdraw()
    await half.offer.ended  # its blocks are offered again
    assert await works(half.source, half.target)


async def test_the_memory_of_a_decode_engine_that_ends_between_copies_stays_until_they_end(
    half: Halfway,
) -> None:
    engines = half.both.decode.engines
    processes = [one for known in engines.engines.values() for one in known.processes]
    await half.leave.aclose()
    await until(lambda: not engines.engines)
    kept = [given_back(process) for process in processes]
    half.gate.set()
    await until(lambda: all(map(given_back, processes)))

    assert not all(kept)
    await half.offer.withdraw()
