"""One READ that is copied to several ranks: whatever ends between two of the copies.

The agent's only copy thread is held up, with the box read and the first rank written: so each end
comes at the worst moment. The sessions of the engines write over blocks that are released, and see
whether anything lands in those that are free.
"""

import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from kvbus.agent.engines.local_engine import EngineProcess
from kvbus.agent.process.runtime import Runtime
from kvbus.engine import DecodeSession, Fetch, Offer, PrefillSession
from kvbus.errors import ErrorCode
from kvbus.geometry import GroupSpec, KvPart
from kvbus.protocol import Outcome
from kvbus_decode.agent import DecodeService
from kvbus_decode.read.leg import LegState
from kvbus_decode.read.reader import Reader
from tests.agents import WITHIN_S, until
from tests.decode.lent import Neighbours, neighbours
from tests.engines import Engine, Snapshot, engine, failure_of, make_spec, same, works
from tests.expected import expected_after
from tests.prefill.inside import given_back

pytestmark = pytest.mark.anyio

LATENT = GroupSpec("latent", (0, 1), 16, 1, 32, "bfloat16", (KvPart.LATENT,))
NUM_RANKS, NUM_TOKENS = 4, 40
ENDS = (ErrorCode.ENGINE_LOST, ErrorCode.STALE, ErrorCode.OFFER_WITHDRAWN)


@dataclass
class HeldThread:
    """The copy thread does nothing else from ``begun`` on until the gate opens."""

    begun: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)

    def hold(self) -> None:
        """What the thread does."""
        self.begun.set()
        assert self.gate.wait(2 * WITHIN_S)


@dataclass
class Halfway:
    """A handoff of which one rank has its bytes, and the others wait for theirs."""

    source: Engine
    target: Engine
    reader: Reader
    offer: Offer
    fetch: Fetch
    wanted: Snapshot
    before: Snapshot
    thread: HeldThread

    def ranks_written(self) -> list[int]:
        """Ranks that have all of their bytes; the others have none."""
        now = self.target.snapshot()
        written = [rank for rank in now if torch.equal(now[rank], self.wanted[rank])]
        others = [rank for rank in now if torch.equal(now[rank], self.before[rank])]
        assert sorted(written + others) == list(range(NUM_RANKS))
        return written


def states(reader: Reader) -> list[LegState]:
    """Of all legs that are under way."""
    return [leg.state for read in reader._table.live.values() for leg in read.live]


@asynccontextmanager
async def site(folder: Path) -> AsyncIterator[tuple[Neighbours, Reader]]:
    """Two agents, of which the decode agent reads through slots and copies by one thread."""
    settings = {"path": "packed", "mapped": False, "copy_threads": 1}
    async with neighbours(folder, decode=settings) as both:
        service = both.decode.service
        assert isinstance(service, DecodeService)
        yield both, service._reader


@asynccontextmanager
async def halfway(reader: Reader, source: Engine, target: Engine) -> AsyncIterator[Halfway]:
    """The thread serves its works in turn: it is held, copies to one rank, and is held again."""
    assert await works(source, target)
    theirs, ours = source.some_blocks(5, NUM_TOKENS), target.some_blocks(6, NUM_TOKENS)
    before = target.snapshot()
    wanted = expected_after(before, source, theirs, target, ours, num_tokens=NUM_TOKENS)
    first, second = HeldThread(), HeldThread()
    try:
        reader._copiers.start_alone(first.hold, lambda: None)
        await until(first.begun.is_set)
        offer = await source.prefill.offer("r", num_tokens=NUM_TOKENS, block_ids=theirs)
        fetch = target.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours)
        await until(lambda: states(reader) == [LegState.COPYING])
        reader._copiers.start_alone(second.hold, lambda: None)
        first.gate.set()
        await until(second.begun.is_set)
        yield Halfway(source, target, reader, offer, fetch, wanted, before, second)
    finally:
        first.gate.set()
        second.gate.set()
    await until(lambda: reader.num_slots_in_use == 0)


@asynccontextmanager
async def source_of(both: Neighbours) -> AsyncIterator[Engine]:
    """A prefill engine of one rank, until its agent has given its memory back."""
    spec = make_spec(groups=(LATENT,))
    async with engine(PrefillSession, both.prefill.attach, spec, seed=1) as source:
        processes = processes_of(both.prefill.runtime)
        yield source
    await until(lambda: all(map(given_back, processes)))


@asynccontextmanager
async def target_of(both: Neighbours) -> AsyncIterator[Engine]:
    """A decode engine whose ranks all hold the same, until its agent has given its memory back."""
    async with open_target(both) as target:
        processes = processes_of(both.decode)
        yield target
    await until(lambda: all(map(given_back, processes)))


def open_target(both: Neighbours) -> AbstractAsyncContextManager[Engine]:
    """The same, and nothing is waited for."""
    spec = make_spec(tp=NUM_RANKS, groups=(LATENT,))
    return engine(DecodeSession, both.decode.config.attach_path, spec, seed=2)


def processes_of(agent: Runtime) -> list[EngineProcess]:
    """Those of the engines that an agent has now."""
    return [one for known in agent.agent.engines.engines.values() for one in known.processes]


@asynccontextmanager
async def all_halfway(folder: Path) -> AsyncIterator[Halfway]:
    """Agents, engines and their handoff."""
    async with (
        site(folder) as (both, reader),
        source_of(both) as source,
        target_of(both) as target,
        halfway(reader, source, target) as half,
    ):
        yield half


async def test_the_slot_stays_until_the_last_rank_is_written(folder) -> None:
    async with all_halfway(folder) as half:
        written, in_use = half.ranks_written(), half.reader.num_slots_in_use
        half.thread.gate.set()
        fetched = await half.fetch.completed()

        assert (len(written), in_use) == (1, 1)
        assert same(half.target.snapshot(), half.wanted)
        assert fetched.num_bytes == NUM_TOKENS * 2 * 32 * 2  # layers, dims, bytes: one copy


async def test_a_fetch_cancelled_between_copies_writes_no_further_rank(folder) -> None:
    async with all_halfway(folder) as half:
        written = half.ranks_written()
        await half.fetch.cancel()
        failure = await failure_of(half.fetch)
        in_use = half.reader.num_slots_in_use
        half.thread.gate.set()
        await half.fetch.blocks_freed()

        assert (failure.code, failure.blocks_free) == (ErrorCode.CANCELLED, False)
        assert (in_use, half.reader.num_slots_in_use) == (1, 0)
        assert half.ranks_written() == written
        await half.offer.withdraw()
        assert await works(half.source, half.target)


async def test_an_offer_withdrawn_between_copies_is_released_and_never_completed(folder) -> None:
    async with all_halfway(folder) as half:
        await half.offer.withdraw()
        outcome = await half.offer.released()
        half.thread.gate.set()
        failure = await failure_of(half.fetch)
        await half.fetch.blocks_freed()

        assert (outcome, failure.code) == (Outcome.WITHDRAWN, ErrorCode.OFFER_WITHDRAWN)
        assert await works(half.source, half.target)


async def test_a_prefill_engine_that_ends_between_copies_fails_the_fetch(folder) -> None:
    async with site(folder) as (both, reader), target_of(both) as target:
        async with source_of(both) as source:
            context = halfway(reader, source, target)
            half = await context.__aenter__()
        half.thread.gate.set()
        failure = await failure_of(half.fetch)
        await half.fetch.blocks_freed()
        await context.__aexit__(None, None, None)

        assert failure.code in ENDS
        async with source_of(both) as another:
            assert await works(another, target)


async def test_the_memory_of_a_decode_engine_that_ends_between_copies_stays_until_they_end(
    folder,
) -> None:
    async with site(folder) as (both, reader), source_of(both) as source:
        async with open_target(both) as target:
            context = halfway(reader, source, target)
            half = await context.__aenter__()
            processes = processes_of(both.decode)
        await until(lambda: not both.decode.agent.engines.engines)
        kept = [given_back(process) for process in processes]
        half.thread.gate.set()
        await until(lambda: all(map(given_back, processes)))
        await context.__aexit__(None, None, None)

        assert not all(kept)
        await half.offer.withdraw()
        async with target_of(both) as another:
            assert await works(source, another)
