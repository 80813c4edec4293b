"""The packed path: whatever fails while boxes are on their way, slots and blocks come back."""

import signal
from collections.abc import Iterator

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode, PeerLost
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, Agents, agents_ended, until
from tests.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    engine,
    failure_of,
    make_spec,
    pair,
    same,
    start_long_read,
    works,
)
from tests.faults.conftest import DECODE, PREFILL, SLOW_READS

pytestmark = pytest.mark.anyio

LONG = {"groups": (LARGE,), "num_blocks": NUM_LARGE_BLOCKS}
RING = {"staging_bytes": 4 << 18, "slot_bytes": 1 << 18}
NO_ANSWER = (ErrorCode.LEASE_EXPIRED, ErrorCode.TIMEOUT)
GONE = (*NO_ANSWER, ErrorCode.PEER_LOST, ErrorCode.TRANSFER_FAILED, ErrorCode.STALE)


class Site:
    """A slow prefill agent, another one, and a decode agent with a small ring."""

    def __init__(self, agents: Agents) -> None:
        self.agents = agents
        self.prefill, self.other = (
            agents.prepare("prefill", **SLOW_READS, **PREFILL, **RING) for _ in range(2)
        )
        self.decode: AgentProcess = agents.prepare(
            "decode", **SLOW_READS, **DECODE, **RING, path="packed"
        )


@pytest.fixture(scope="module")
def shared_site() -> Iterator[Site]:
    """The agents of this file, ended with its last test."""
    with agents_ended(Agents) as agents:
        site = Site(agents)
        agents.start(site.prefill, site.decode)
        agents.start(site.other)
        yield site


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    """The agents, which must hold nothing after each test; one that was killed is restarted."""
    yield shared_site
    shared_site.agents.check()
    for agent in shared_site.agents.all:
        if not agent.alive:
            agent.start()


def slots(agent: AgentProcess) -> int:
    """Staging slots in use."""
    return int(agent.status()["counts"]["slots"])


async def test_slots_and_blocks_are_withheld_until_a_stopped_prefill_agent_goes_on(site):
    async with (
        pair(site.prefill.attach, site.decode.attach, **LONG) as (source, target),
        engine(
            PrefillSession,
            site.other.attach,
            make_spec(groups=(LARGE,)),
            num_blocks=NUM_LARGE_BLOCKS,
            seed=5,
        ) as healthy,
    ):
        offer, fetch = await start_long_read(source, target)

        site.prefill.signal(signal.SIGSTOP)
        failure = await failure_of(fetch)
        withheld = slots(site.decode)
        meanwhile = await works(healthy, target)
        site.prefill.signal(signal.SIGCONT)
        await fetch.blocks_freed()
        await offer.withdraw()
        await offer.released()

        assert failure.code in NO_ANSWER
        assert failure.stage == "reading"
        assert meanwhile
        assert withheld <= RING["staging_bytes"] // RING["slot_bytes"] // 2
        assert await works(source, target)


async def test_many_fetches_from_a_stopped_prefill_agent_leave_slots_for_others(site):
    async with (
        pair(site.prefill.attach, site.decode.attach, **LONG) as (source, target),
        engine(
            PrefillSession,
            site.other.attach,
            make_spec(groups=(LARGE,)),
            num_blocks=NUM_LARGE_BLOCKS,
            seed=5,
        ) as healthy,
    ):
        blocks = source.some_blocks(5, 64 * 512)["full"], target.some_blocks(6, 64 * 512)["full"]
        offers, fetches = [], []
        for number in range(4):
            part = slice(100 * number, 100 * (number + 1))
            offers.append(
                await source.prefill.offer(
                    f"r{number}", num_tokens=6400, block_ids={"full": blocks[0][part]}
                )
            )
            fetches.append(
                target.decode.fetch(
                    offers[-1].ticket, num_tokens=6400, block_ids={"full": blocks[1][part]}
                )
            )
        await until(lambda: slots(site.decode) and slots(site.prefill))

        site.prefill.signal(signal.SIGSTOP)
        failures = [await failure_of(fetch) for fetch in fetches]
        meanwhile = await works(healthy, target)
        site.prefill.signal(signal.SIGCONT)
        for fetch, offer in zip(fetches, offers, strict=True):
            await fetch.blocks_freed()
            await offer.withdraw()
            await offer.released()

        assert {failure.code for failure in failures} <= set(NO_ANSWER)
        assert meanwhile
        assert await works(source, target)


async def test_a_killed_prefill_agent_fails_the_fetch_and_all_slots_come_back(site):
    async with engine(
        DecodeSession, site.decode.attach, make_spec(groups=(LARGE,)), num_blocks=NUM_LARGE_BLOCKS
    ) as target:
        spec = make_spec(groups=(LARGE,))
        async with engine(
            PrefillSession, site.prefill.attach, spec, num_blocks=NUM_LARGE_BLOCKS, seed=1
        ) as source:
            offer, fetch = await start_long_read(source, target, timeout_s=10.0)

            site.prefill.kill()
            failure = await failure_of(fetch)
            with pytest.raises(PeerLost):
                await offer.released()
            await fetch.blocks_freed()
            await until(lambda: slots(site.decode) == 0)
        site.prefill.start()
        async with engine(
            PrefillSession, site.prefill.attach, spec, num_blocks=NUM_LARGE_BLOCKS, seed=3
        ) as source:
            works_again = await works(source, target)

        assert failure.code in GONE
        assert works_again


async def test_a_prefill_engine_that_leaves_during_gathers_is_unmapped_after_them(site):
    async with engine(
        DecodeSession, site.decode.attach, make_spec(groups=(LARGE,)), num_blocks=NUM_LARGE_BLOCKS
    ) as target:
        spec = make_spec(groups=(LARGE,))
        async with engine(
            PrefillSession, site.prefill.attach, spec, num_blocks=NUM_LARGE_BLOCKS, seed=1
        ) as source:
            _, fetch = await start_long_read(source, target)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        await until(lambda: not site.prefill.memory_maps(spec.engine_id))
        await until(lambda: not slots(site.prefill))

        assert failure.code is ErrorCode.ENGINE_LOST


async def test_a_decode_engine_that_leaves_during_scatters_is_unmapped_after_them(site):
    async with engine(
        PrefillSession,
        site.prefill.attach,
        make_spec(groups=(LARGE,)),
        num_blocks=NUM_LARGE_BLOCKS,
        seed=1,
    ) as source:
        spec = make_spec(groups=(LARGE,))
        async with engine(
            DecodeSession, site.decode.attach, spec, num_blocks=NUM_LARGE_BLOCKS, seed=2
        ) as target:
            offer, _ = await start_long_read(source, target)
        await until(lambda: not site.decode.memory_maps(spec.engine_id))
        await until(lambda: site.prefill.status()["counts"]["leases"] == 0)

        assert site.decode.says("handoff.failed", engine_id=spec.engine_id, code="engine_lost")
        assert slots(site.decode) == 0
        await until(lambda: slots(site.prefill) == 0)
        await offer.withdraw()


async def test_an_offer_withdrawn_while_boxes_are_in_flight_is_never_completed(site):
    async with pair(site.prefill.attach, site.decode.attach, **LONG) as (source, target):
        offer, fetch = await start_long_read(source, target)

        await offer.withdraw()
        outcome = await offer.released()
        failure = await failure_of(fetch)
        await fetch.blocks_freed()

        assert outcome is Outcome.WITHDRAWN
        assert failure.code is ErrorCode.OFFER_WITHDRAWN
        await until(lambda: slots(site.prefill) == 0)
        assert await works(source, target)


async def test_a_lease_that_ends_under_a_packed_read_fails_it(site):
    async with pair(site.prefill.attach, site.decode.attach, **LONG) as (source, target):
        offer, fetch = await start_long_read(source, target)

        site.decode.signal(signal.SIGSTOP)
        await until(lambda: site.prefill.status()["counts"]["leases"] == 0)
        await until(lambda: slots(site.prefill) == 0)
        site.decode.signal(signal.SIGCONT)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()

        assert failure.code in NO_ANSWER
        await offer.withdraw()
        await offer.released()
        assert await works(source, target)


async def test_slots_of_a_killed_decode_agent_come_back_with_its_lease(site):
    async with engine(
        PrefillSession,
        site.prefill.attach,
        make_spec(groups=(LARGE,)),
        num_blocks=NUM_LARGE_BLOCKS,
        seed=1,
    ) as source:
        async with engine(
            DecodeSession,
            site.decode.attach,
            make_spec(groups=(LARGE,)),
            num_blocks=NUM_LARGE_BLOCKS,
        ) as target:
            offer, fetch = await start_long_read(source, target)

            site.decode.kill()
            failure = await failure_of(fetch)
        await until(lambda: slots(site.prefill) == 0)

        assert (failure.stage, failure.code) == ("lost", ErrorCode.PEER_LOST)
        await until(lambda: site.prefill.status()["counts"]["leases"] == 0)
        await offer.withdraw()


async def test_a_fetch_cancelled_in_the_middle_leaves_no_slot_in_use(site):
    async with pair(site.prefill.attach, site.decode.attach, **LONG) as (source, target):
        offer, fetch = await start_long_read(source, target)

        await fetch.cancel()
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        of_ours = slots(site.decode)
        await until(lambda: slots(site.prefill) == 0)

        assert failure.code is ErrorCode.CANCELLED
        assert of_ours == 0
        await offer.withdraw()
        await offer.released()
        assert await works(source, target)


@pytest.mark.parametrize("without", ["prefill", "decode"])
async def test_an_agent_without_staging_is_read_directly_or_a_forced_path_fails(fresh, without):
    nothing = {"staging_bytes": 0}
    prefill = fresh.prefill(**(nothing if without == "prefill" else {}))
    auto = fresh.decode(**(nothing if without == "decode" else {}))
    forced = fresh.decode(**(nothing if without == "decode" else {}), path="packed")
    fresh.start(prefill, auto, forced)
    async with (
        pair(prefill.attach, auto.attach) as (source, target),
        engine(DecodeSession, forced.attach, seed=3) as unable,
    ):
        before = unable.snapshot()
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})

        fetch = unable.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
        failure = await failure_of(fetch)

        assert (failure.code, failure.blocks_free) == (ErrorCode.CONFIG, True)
        assert "path" in failure.message
        assert "staging_bytes" in failure.message
        assert same(unable.snapshot(), before)
        assert await works(source, target)
        await offer.withdraw()


async def test_more_boxes_than_may_wait_are_busy_and_their_fetch_says_so(fresh):
    prefill = fresh.prefill(**SLOW_READS, **RING, max_packs=1)
    decode = fresh.decode(**SLOW_READS, **RING, path="packed", boxes_in_flight=8)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        assert await works(source, target)  # no box waits for torch from here on
        num_tokens = 64 * NUM_LARGE_BLOCKS
        theirs, ours = source.some_blocks(5, num_tokens), target.some_blocks(6, num_tokens)
        offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=theirs)

        fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()

        assert failure.code is ErrorCode.BUSY
        assert prefill.metric("refusals_total", code="busy") >= 1
        await until(lambda: slots(prefill) == 0)
        await offer.withdraw()
        await offer.released()
        assert await works(source, target)
