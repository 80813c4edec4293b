"""An agent that is stopped or killed fails what it was part of, within a deadline, and no more."""

import signal
from contextlib import AbstractAsyncContextManager

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode, FetchFailed, PeerLost
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, until
from tests.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    Engine,
    engine,
    failure_of,
    make_spec,
    pair,
    start_long_read,
    story_of,
    works,
)
from tests.faults.conftest import SLOW_READS

pytestmark = pytest.mark.anyio

Kind = type[PrefillSession] | type[DecodeSession]

TCP = SLOW_READS
LONG = {"groups": (LARGE,), "num_blocks": NUM_LARGE_BLOCKS}


def large(kind: Kind, agent: AgentProcess, *, seed: int = 0) -> AbstractAsyncContextManager[Engine]:
    """An engine whose cache takes a while to read."""
    spec = make_spec(groups=(LARGE,))
    return engine(kind, agent.attach, spec, num_blocks=NUM_LARGE_BLOCKS, seed=seed)


NO_ANSWER = (ErrorCode.LEASE_EXPIRED, ErrorCode.TIMEOUT)


async def test_blocks_are_withheld_until_a_stopped_prefill_agent_goes_on(slow):
    prefill, decode = slow.all
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        offer, fetch = await start_long_read(source, target)

        prefill.signal(signal.SIGSTOP)
        failure = await failure_of(fetch)
        withheld = decode.metric("quarantined_blocks")
        freed_early = decode.logged("blocks.freed", fetch_id=fetch.fetch_id)
        prefill.signal(signal.SIGCONT)
        await fetch.blocks_freed()

        assert failure.code in NO_ANSWER
        assert (failure.stage, failure.blocks_free) == ("reading", False)
        assert withheld == NUM_LARGE_BLOCKS
        assert freed_early == []
        assert decode.metric("quarantined_blocks") == 0
        assert decode.metric("handoffs_total", outcome="failed", code=failure.code.value) >= 1
        assert decode.says("handoff.failed", fetch_id=fetch.fetch_id, blocks_free=False)
        await offer.withdraw()
        await offer.released()
        assert await works(source, target)


async def test_a_fetch_keeps_its_deadline_though_its_lease_would_last(fresh):
    prefill, decode = fresh.prefill(**TCP), fresh.decode(**TCP, lease_s=25.0)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        offer, fetch = await start_long_read(source, target, timeout_s=3.0)

        prefill.signal(signal.SIGSTOP)
        failure = await failure_of(fetch)
        prefill.signal(signal.SIGCONT)
        await fetch.blocks_freed()

        assert failure.code is ErrorCode.TIMEOUT
        assert (failure.stage, failure.blocks_free) == ("reading", False)
        await offer.withdraw()


async def test_an_offer_withdrawn_while_it_is_read_is_released_and_its_fetch_fails(slow):
    prefill, decode = slow.all
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        offer, fetch = await start_long_read(source, target)

        await offer.withdraw()
        outcome = await offer.released()
        failure = await failure_of(fetch)
        await fetch.blocks_freed()

        assert outcome is Outcome.WITHDRAWN
        assert failure.code is ErrorCode.OFFER_WITHDRAWN
        assert prefill.metric("leases_total", reason="revoked") >= 1
        assert prefill.says("lease.revoked", offer_id=offer.offer_id)
        assert await works(source, target)


async def test_a_fetch_cancelled_while_it_is_read_ends_and_gives_its_blocks_back(slow):
    prefill, decode = slow.all
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        offer, fetch = await start_long_read(source, target)

        await fetch.cancel()
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        await until(lambda: prefill.status()["counts"]["leases"] == 0)

        assert failure.code is ErrorCode.CANCELLED
        assert decode.metric("handoffs_total", outcome="cancelled") >= 1
        assert prefill.metric("offers") == 1
        await offer.withdraw()
        await offer.released()
        assert await works(source, target)


async def test_an_engine_that_leaves_while_it_is_read_fails_the_fetch(slow):
    prefill, decode = slow.all
    async with large(DecodeSession, decode) as target:
        async with large(PrefillSession, prefill, seed=3) as source:
            _, fetch = await start_long_read(source, target)

        failure = await failure_of(fetch)
        await fetch.blocks_freed()

        assert failure.code is ErrorCode.ENGINE_LOST


async def test_a_killed_prefill_agent_fails_the_read_and_works_when_it_is_back(slow_and_fresh):
    prefill, decode = slow_and_fresh.all
    async with large(DecodeSession, decode) as target:
        async with large(PrefillSession, prefill, seed=3) as source:
            offer, fetch = await start_long_read(source, target)

            prefill.kill()
            failure = await failure_of(fetch)
            with pytest.raises(PeerLost):
                await offer.released()
            await fetch.blocks_freed()

        prefill.start()
        async with large(PrefillSession, prefill, seed=3) as source:
            works_at_once = await works(source, target)
            old = target.decode.fetch(offer.ticket, num_tokens=0, block_ids={"full": []})
            stale = await failure_of(old)

            assert failure.code is ErrorCode.PEER_LOST
            assert works_at_once
            assert stale.code is ErrorCode.STALE
            assert decode.metric("quarantined_blocks") == 0


async def test_a_restarted_prefill_agent_fails_the_fetches_of_the_one_before(fresh):
    prefill, decode = fresh.prefill(), fresh.decode(lease_s=20.0, request_timeout_s=20.0)
    fresh.start(prefill, decode)
    async with engine(DecodeSession, decode.attach, seed=1) as target:
        async with engine(PrefillSession, prefill.attach, seed=2) as source:
            offer = await source.prefill.offer(
                "r", num_tokens=0, block_ids={"full": []}, sealed=False
            )
            fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
            await until(lambda: prefill.status()["counts"]["leases"] == 1)
            prefill.kill()

        prefill.start()
        failure = await failure_of(fetch)

        assert failure.code in (ErrorCode.PEER_LOST, ErrorCode.STALE)
        assert decode.says("peer.restarted")
        async with engine(PrefillSession, prefill.attach, seed=2) as source:
            assert await works(source, target)


async def test_a_killed_decode_agent_loses_its_lease_and_another_reads_the_offer(fresh):
    prefill, decode, other = fresh.prefill(**TCP), fresh.decode(**TCP), fresh.decode(**TCP)
    fresh.start(prefill, decode, other)
    async with large(PrefillSession, prefill, seed=3) as source:
        async with large(DecodeSession, decode) as target:
            offer, fetch = await start_long_read(source, target)

            decode.kill()
            failure = await failure_of(fetch)
        async with large(DecodeSession, other) as target:
            again = target.decode.fetch(
                offer.ticket, num_tokens=64, block_ids={"full": [7]}, timeout_s=20.0
            )
            await again.completed()

            assert (failure.stage, failure.code) == ("lost", ErrorCode.PEER_LOST)
            assert await offer.released() is Outcome.COMPLETED
            assert prefill.metric("leases_total", reason="expired") == 1
            assert prefill.says("lease.expired", offer_id=offer.offer_id)
            assert await works(source, target)


async def test_an_offer_whose_reader_was_killed_expires(fresh):
    prefill, decode = fresh.prefill(offer_ttl_s=5.0), fresh.decode()
    fresh.start(prefill, decode)
    async with engine(PrefillSession, prefill.attach) as source:
        async with engine(DecodeSession, decode.attach) as target:
            offer = await source.prefill.offer(
                "r", num_tokens=0, block_ids={"full": []}, sealed=False
            )
            target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
            await until(lambda: prefill.status()["counts"]["leases"] == 1)
            decode.kill()

        assert await offer.released() is Outcome.EXPIRED
        assert prefill.metric("offers_total", outcome="expired") == 1


async def test_over_shared_memory_a_stopped_prefill_agent_is_missed_at_the_confirm(fresh):
    slices = {"transport": SLOW_READS["transport"]}
    prefill, decode = fresh.prefill(**slices), fresh.decode(**slices, lease_s=25.0)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        assert await works(source, target)  # sets the connection up, for which both are needed
        offer, fetch = await start_long_read(source, target, timeout_s=8.0)

        prefill.signal(signal.SIGSTOP)
        failure = await failure_of(fetch)
        prefill.signal(signal.SIGCONT)

        assert failure.code is ErrorCode.TIMEOUT
        assert (failure.stage, failure.blocks_free) == ("confirming", True)
        assert await offer.released() is Outcome.COMPLETED
        assert await works(source, target)


async def test_a_confirm_whose_reply_is_late_is_asked_again_and_the_fetch_completes(fresh):
    slices = {"transport": SLOW_READS["transport"]}
    prefill = fresh.prefill(**slices, max_lease_s=120.0)
    decode = fresh.decode(**slices, lease_s=120.0, request_timeout_s=0.5)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        assert await works(source, target)  # sets the connection up, for which both are needed
        offer, fetch = await start_long_read(source, target, timeout_s=60.0)

        prefill.signal(signal.SIGSTOP)
        await until(lambda: str(story_of(target, fetch)).count("StepFailed") >= 2)
        prefill.signal(signal.SIGCONT)

        assert (await fetch.completed()).stage == "completed"
        assert await offer.released() is Outcome.COMPLETED


async def test_everything_that_waits_for_a_killed_agent_is_told(fresh):
    prefill, decode = fresh.prefill(), fresh.decode()
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []}, sealed=False)
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
        await until(lambda: prefill.status()["counts"]["leases"] == 1)

        for agent in (prefill, decode):
            agent.kill()
        with pytest.raises(PeerLost):
            await offer.released()
        with pytest.raises(FetchFailed) as failed:
            await fetch.completed()
        await fetch.blocks_freed()
        with pytest.raises(PeerLost):
            await offer.seal()
        with pytest.raises(PeerLost):
            target.decode.fetch(offer.ticket, num_tokens=0, block_ids={"full": []})

        assert failed.value.code is ErrorCode.PEER_LOST


async def test_a_prefill_agent_that_answers_nothing_is_left_and_found_again(fresh):
    prefill, decode = fresh.prefill(), fresh.decode(forget_peer_s=2.0)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)

        prefill.signal(signal.SIGSTOP)
        await until(lambda: decode.logged("peer.left", peer=prefill.peer))
        num_peers = decode.metric("peers")
        prefill.signal(signal.SIGCONT)

        assert num_peers == 0
        assert await works(source, target)
