"""The mapped path: whatever fails while it is copied, no zero counts and the blocks come back."""

import signal
from typing import Any

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome
from tests.agents import until
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
from tests.faults.conftest import SLOW_COPIES, Started

pytestmark = pytest.mark.anyio

SHAPE = {"num_blocks": NUM_LARGE_BLOCKS}
LONG = {"groups": (LARGE,), **SHAPE}
ENDED = (ErrorCode.LEASE_EXPIRED, ErrorCode.TIMEOUT, ErrorCode.OFFER_WITHDRAWN)


def source_shape() -> dict[str, Any]:
    """Another engine whose cache takes a while to copy."""
    return {"spec": make_spec(groups=(LARGE,)), **SHAPE, "seed": 3}


async def test_a_fetch_cancelled_in_mid_copy_gives_its_blocks_back_untouched_from_then(copying):
    prefill, decode = copying.all
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        offer, fetch = await start_long_read(source, target)

        await fetch.cancel()
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        after = target.snapshot()
        await until(lambda: prefill.status()["counts"]["leases"] == 0)

        assert failure.code is ErrorCode.CANCELLED
        assert same(target.snapshot(), after)
        await offer.withdraw()
        await offer.released()
        assert await works(source, target)


async def test_an_offer_withdrawn_in_mid_copy_fails_its_fetch(copying):
    prefill, decode = copying.all
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        offer, fetch = await start_long_read(source, target)

        await offer.withdraw()
        outcome = await offer.released()  # its blocks are written over at that moment
        failure = await failure_of(fetch)
        await fetch.blocks_freed()

        assert outcome is Outcome.WITHDRAWN
        assert failure.code is ErrorCode.OFFER_WITHDRAWN
        assert await works(source, target)


async def test_a_copy_of_an_agent_that_is_stopped_for_longer_than_its_lease_does_not_count(copying):
    prefill, decode = copying.all
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        offer, fetch = await start_long_read(source, target)

        decode.signal(signal.SIGSTOP)
        prefill.says("lease.expired", offer_id=offer.offer_id)
        await offer.withdraw()
        await offer.released()
        decode.signal(signal.SIGCONT)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()

        assert failure.code in ENDED
        assert await works(source, target)


async def test_a_prefill_agent_that_is_stopped_in_mid_copy_is_missed_at_the_confirm(copying):
    prefill, decode = copying.all
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        offer, fetch = await start_long_read(source, target, timeout_s=8.0)

        prefill.signal(signal.SIGSTOP)
        failure = await failure_of(fetch)
        prefill.signal(signal.SIGCONT)

        assert failure.code in ENDED
        assert failure.blocks_free
        await offer.withdraw()
        await offer.released()
        assert await works(source, target)


async def test_a_prefill_agent_that_is_killed_in_mid_copy_fails_it_and_works_when_it_is_back(
    fresh: Started,
):
    prefill, decode = fresh.prefill(), fresh.decode(**SLOW_COPIES)
    fresh.start(prefill, decode)
    spec = make_spec(groups=(LARGE,))
    async with engine(DecodeSession, decode.attach, spec, **SHAPE, seed=2) as target:
        async with engine(PrefillSession, prefill.attach, **source_shape()) as source:
            _, fetch = await start_long_read(source, target)

            prefill.kill()
            failure = await failure_of(fetch)
            await fetch.blocks_freed()

        prefill.start()
        async with engine(PrefillSession, prefill.attach, **source_shape()) as source:
            assert failure.code is ErrorCode.PEER_LOST
            assert await works(source, target)


async def test_a_decode_agent_that_is_killed_in_mid_copy_leaves_the_offer_to_another(
    fresh: Started,
):
    prefill, decode, other = (
        fresh.prefill(),
        fresh.decode(**SLOW_COPIES),
        fresh.decode(**SLOW_COPIES),
    )
    fresh.start(prefill, decode, other)
    async with engine(PrefillSession, prefill.attach, **source_shape()) as source:
        async with engine(DecodeSession, decode.attach, **source_shape()) as target:
            offer, fetch = await start_long_read(source, target)

            decode.kill()
            failure = await failure_of(fetch)
        async with engine(DecodeSession, other.attach, **source_shape()) as target:
            again = target.decode.fetch(
                offer.ticket, num_tokens=64, block_ids={"full": [7]}, timeout_s=20.0
            )
            await again.completed()

            assert (failure.stage, failure.code) == ("lost", ErrorCode.PEER_LOST)
            assert await offer.released() is Outcome.COMPLETED
            assert await works(source, target)


async def test_a_prefill_engine_that_leaves_in_mid_copy_fails_the_fetch_by_name(copying):
    prefill, decode = copying.all
    spec = make_spec(groups=(LARGE,))
    async with engine(DecodeSession, decode.attach, spec, **SHAPE, seed=2) as target:
        async with engine(PrefillSession, prefill.attach, **source_shape()) as source:
            _, fetch = await start_long_read(source, target)

        failure = await failure_of(fetch)
        await fetch.blocks_freed()

        assert failure.code is ErrorCode.ENGINE_LOST


async def test_a_decode_engine_that_leaves_in_mid_copy_is_given_back_and_the_offer_read_again(
    copying,
):
    prefill, decode = copying.all
    async with engine(PrefillSession, prefill.attach, **source_shape()) as source:
        spec = make_spec(groups=(LARGE,))
        shape = {**SHAPE, "seed": 2}
        async with engine(DecodeSession, decode.attach, spec, **shape) as target:
            offer, _ = await start_long_read(source, target)
        await until(decode.idle)
        await until(lambda: not decode.memory_maps(spec.engine_id))

        async with engine(DecodeSession, decode.attach, spec, **shape) as target:
            again = target.decode.fetch(offer.ticket, num_tokens=64, block_ids={"full": [1]})
            await again.completed()

            assert await offer.released() is Outcome.COMPLETED
            assert await works(source, target)
