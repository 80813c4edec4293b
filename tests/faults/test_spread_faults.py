"""Engines at several agents: whichever of them fails, a fetch ends, and never with wrong bits."""

import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode, PeerLost
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, Agents, agents_ended, until
from tests.e2e.spread_engines import SpreadEngine, spread_engine
from tests.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    failure_of,
    make_spec,
    same,
    start_long_read,
    works,
)
from tests.expected import expected_after
from tests.faults.conftest import DECODE, PREFILL, SLOW_READS

pytestmark = pytest.mark.anyio

NOT_VALID = (
    ErrorCode.STALE,
    ErrorCode.TRANSFER_FAILED,
    ErrorCode.ENGINE_UNKNOWN,
    ErrorCode.ENGINE_LOST,
)
GONE = (*NOT_VALID, ErrorCode.PEER_LOST, ErrorCode.TIMEOUT, ErrorCode.LEASE_EXPIRED)
TIMEOUT_S = 6.0
LATE_S = 0.5
"""Not later than a fetch that has asked for its yes may end (`confirm_grace_s`)."""
RING = {"staging_bytes": 8 << 18, "slot_bytes": 1 << 18}


class Sites:
    """Two slow prefill agents, and two decode agents for each path; a home and another."""

    def __init__(self, agents: Agents) -> None:
        self.agents = agents
        self.prefill: list[AgentProcess] = [
            agents.prepare("prefill", **SLOW_READS, **PREFILL, **RING) for _ in range(2)
        ]
        self.direct, self.packed = (
            [agents.prepare("decode", **SLOW_READS, **DECODE, **RING, path=path) for _ in range(2)]
            for path in ("direct", "packed")
        )


@pytest.fixture(scope="module")
def shared_sites() -> Iterator[Sites]:
    """The agents of this file, ended with its last test."""
    with agents_ended(Agents) as agents:
        sites = Sites(agents)
        for side in (sites.prefill, sites.direct, sites.packed):
            agents.start(*side)
        yield sites


@pytest.fixture
def sites(shared_sites: Sites) -> Iterator[Sites]:
    """The agents, which must hold nothing after each test; one that was killed is restarted."""
    yield shared_sites
    shared_sites.agents.check()
    for agent in shared_sites.agents.all:
        if not agent.alive:
            agent.start()


@pytest.fixture(params=["direct", "packed"])
def readers(request: pytest.FixtureRequest, sites: Sites) -> list[AgentProcess]:
    """The decode agents that take one of the paths."""
    agents: list[AgentProcess] = getattr(sites, request.param)
    return agents


@asynccontextmanager
async def spread_pair(
    sites: Sites, readers: list[AgentProcess]
) -> AsyncIterator[tuple[SpreadEngine, SpreadEngine]]:
    """A prefill and a decode engine of two ranks each, at two agents each."""
    source_spec, target_spec = (make_spec(tp=2, groups=(LARGE,)) for _ in range(2))
    shape = {"num_blocks": NUM_LARGE_BLOCKS}
    async with (
        spread_engine(PrefillSession, sites.prefill, source_spec, seed=1, **shape) as source,
        spread_engine(DecodeSession, readers, target_spec, seed=2, **shape) as target,
    ):
        yield source, target


async def withheld_for_a_sibling(home: AgentProcess) -> int:
    """Fetches whose blocks are withheld though no transfer of their home is left."""
    await until(lambda: not home.metric("outstanding_handles"))
    return int(home.status()["counts"]["draining_fetches"])


async def test_a_prefill_rank_that_leaves_while_it_is_read_fails_the_fetch(sites, readers):
    async with spread_pair(sites, readers) as (source, target):
        offer, fetch = await start_long_read(source, target)

        await source.lose(1)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        await offer.withdraw()
        await offer.released()
        await source.bring_back(1)
        source.fill(3)

        assert failure.code in NOT_VALID
        assert await works(source, target)


async def test_a_prefill_rank_that_leaves_after_the_read_fails_the_fetch(sites, readers):
    async with spread_pair(sites, readers) as (source, target):
        before = target.snapshot()
        offer = await source.prefill.offer(
            "r", num_tokens=64, block_ids={"full": [3]}, sealed=False
        )
        fetch = target.decode.fetch(offer.ticket, num_tokens=64, block_ids={"full": [5]})
        await until(lambda: target.views()[1, 0, "v"][5].equal(source.views()[1, 0, "v"][3]))
        await until(lambda: not readers[1].status()["counts"]["delegated_reads"])

        await source.lose(1)
        await until(lambda: not sites.prefill[1].memory_maps(source.spec.engine_id))
        await offer.seal()
        failure = await failure_of(fetch)
        await offer.withdraw()

        assert not same(target.snapshot(), before)
        assert failure.code in NOT_VALID
        assert failure.blocks_free


async def test_an_offer_is_left_alone_when_another_agent_of_its_engine_answers_after_the_deadline(
    sites, readers
):
    async with spread_pair(sites, readers) as (source, target):
        offer = await source.prefill.offer(
            "r", num_tokens=64, block_ids={"full": [3]}, sealed=False
        )
        overdue_at = time.monotonic() + TIMEOUT_S
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=64, block_ids={"full": [5]}, timeout_s=TIMEOUT_S
        )
        await until(lambda: target.views()[1, 0, "v"][5].equal(source.views()[1, 0, "v"][3]))
        await until(lambda: not readers[1].status()["counts"]["delegated_reads"])

        sites.prefill[1].signal(signal.SIGSTOP)
        try:
            await offer.seal()
            await until(lambda: time.monotonic() > overdue_at + LATE_S)
        finally:
            sites.prefill[1].signal(signal.SIGCONT)
        failure = await failure_of(fetch)
        await offer.withdraw()

        assert (failure.stage, failure.code) == ("confirming", ErrorCode.TIMEOUT)
        assert await offer.released() is Outcome.WITHDRAWN


async def test_a_killed_prefill_agent_of_some_ranks_fails_the_fetch_until_it_is_back(
    sites, readers
):
    async with spread_pair(sites, readers) as (source, target):
        offer, fetch = await start_long_read(source, target, timeout_s=10.0)

        sites.prefill[1].kill()
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        await offer.withdraw()
        await offer.released()
        await source.lose(1)
        sites.prefill[1].start()
        await source.bring_back(1)
        source.fill(3)

        assert failure.code in GONE
        assert await works(source, target)


async def test_a_restarted_prefill_agent_of_some_ranks_is_shaken_hands_with_anew(sites, readers):
    async with spread_pair(sites, readers) as (source, target):
        assert await works(source, target)
        before = [len(agent.logged("peer.restarted")) for agent in readers]

        sites.prefill[1].kill()
        await source.lose(1)
        sites.prefill[1].start()
        await source.bring_back(1)
        source.fill(3)
        for agent, known in zip(readers, before, strict=True):
            await until(lambda a=agent, n=known: len(a.logged("peer.restarted")) > n)

        assert await works(source, target)


async def test_blocks_are_withheld_until_a_killed_sibling_is_back_as_a_new_process(sites, readers):
    async with spread_pair(sites, readers) as (source, target):
        offer, fetch = await start_long_read(source, target, timeout_s=6.0)

        readers[1].kill()
        failure = await failure_of(fetch)
        withheld = await withheld_for_a_sibling(readers[0])
        await target.lose(1)
        readers[1].start()
        await fetch.blocks_freed()
        await target.bring_back(1)
        await offer.withdraw()
        await offer.released()

        assert failure.code in GONE
        assert not failure.blocks_free
        assert withheld == 1
        assert await works(source, target)


async def test_an_engine_that_leaves_does_not_wait_for_a_killed_sibling(sites, readers):
    async with spread_pair(sites, readers) as (source, target):
        _, fetch = await start_long_read(source, target, timeout_s=12.0)  # agents pack first: slow
        readers[1].kill()
        failure = await failure_of(fetch)
        mapped = readers[0].memory_maps(target.spec.engine_id)
    await until(readers[0].idle)
    await until(lambda: not readers[0].memory_maps(target.spec.engine_id))

    assert mapped
    assert not failure.blocks_free


async def test_blocks_are_withheld_until_a_stopped_sibling_goes_on(sites, readers):
    async with spread_pair(sites, readers) as (source, target):
        offer, fetch = await start_long_read(source, target, timeout_s=3.0)

        readers[1].signal(signal.SIGSTOP)
        failure = await failure_of(fetch)
        withheld = await withheld_for_a_sibling(readers[0])
        readers[1].signal(signal.SIGCONT)
        await fetch.blocks_freed()
        await offer.withdraw()
        await offer.released()

        assert (failure.code, failure.blocks_free) == (ErrorCode.TIMEOUT, False)
        assert withheld == 1
        assert await works(source, target)


async def test_a_decode_rank_that_leaves_while_it_is_read_into_fails_the_fetch(sites, readers):
    async with spread_pair(sites, readers) as (source, target):
        offer, fetch = await start_long_read(source, target)

        await target.lose(1)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        await offer.withdraw()
        await offer.released()
        await target.bring_back(1)

        assert failure.code is ErrorCode.ENGINE_LOST
        assert await works(source, target)


async def test_a_sibling_of_a_killed_home_stops_by_the_deadline(sites, readers):
    async with spread_pair(sites, readers) as (source, target):
        offer, fetch = await start_long_read(source, target, timeout_s=3.0)
        engine_id = target.spec.engine_id
        await until(lambda: readers[1].logged("handshake.done", reader=engine_id))
        deadline = time.monotonic() + 3.0  # of the sibling, or later

        sites.prefill[1].signal(signal.SIGSTOP)
        readers[0].kill()
        failure = await failure_of(fetch)
        with pytest.raises(PeerLost):
            await fetch.blocks_freed()
        await until(lambda: time.monotonic() > deadline)
        sites.prefill[1].signal(signal.SIGCONT)
        await until(readers[1].idle)
        await offer.withdraw()
        await offer.released()

        assert (failure.stage, failure.code) == ("lost", ErrorCode.PEER_LOST)
        assert not failure.blocks_free
        assert readers[1].says("request.refused", op="delegate", code="timeout")


async def test_a_fetch_cancelled_while_siblings_read_ends_at_all_of_them(sites, readers):
    async with spread_pair(sites, readers) as (source, target):
        offer, fetch = await start_long_read(source, target)

        await fetch.cancel()
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        still_read = readers[1].status()["counts"]["delegated_reads"]
        await offer.withdraw()
        await offer.released()

        assert failure.code is ErrorCode.CANCELLED
        assert not still_read
        assert await works(source, target)


async def test_an_offer_withdrawn_while_siblings_read_it_fails_the_fetch(sites, readers):
    async with spread_pair(sites, readers) as (source, target):
        offer, fetch = await start_long_read(source, target)

        await offer.withdraw()
        await offer.released()
        failure = await failure_of(fetch)
        await fetch.blocks_freed()

        assert failure.code is ErrorCode.OFFER_WITHDRAWN
        assert await works(source, target)


async def test_a_delegate_that_is_sent_again_while_it_is_read_is_read_once(sites, readers):
    num_tokens = NUM_LARGE_BLOCKS * LARGE.block_size
    async with spread_pair(sites, readers) as (source, target):
        theirs, ours = source.some_blocks(5, num_tokens), target.some_blocks(6, num_tokens)
        blocks = source, theirs, target, ours
        wanted = expected_after(target.snapshot(), *blocks, num_tokens=num_tokens)
        before = readers[1].metric("bus_repeats")

        offer, fetch = await start_long_read(source, target)
        await until(lambda: readers[1].metric("bus_repeats") > before)
        await fetch.completed()

        assert same(target.snapshot(), wanted)
        assert await offer.released() is Outcome.COMPLETED
