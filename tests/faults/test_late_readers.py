"""A decode agent that is stopped for longer than anybody waits for it, over TCP."""

import signal
from typing import Any

import pytest

from kvbus.engine import DecodeSession, Fetch, Offer, PrefillSession
from kvbus.errors import ErrorCode
from tests.agents import until
from tests.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    Engine,
    engine,
    failure_of,
    make_spec,
    pair,
    start_long_read,
    works,
)
from tests.faults.conftest import Started

pytestmark = pytest.mark.anyio

LONG: dict[str, Any] = {"groups": (LARGE,), "num_blocks": NUM_LARGE_BLOCKS}
ONE_POST: dict[str, Any] = {"slice_bytes": 64 << 20, "slice_descriptors": 1 << 16}
OVER_TCP: dict[str, Any] = {"env": {"UCX_TLS": "tcp"}, "transport": ONE_POST}
LATE = (ErrorCode.LEASE_EXPIRED, ErrorCode.STALE)


@pytest.fixture
def agents(fresh: Started) -> Started:
    """Agents whose READ is one post, of more than the sockets between them hold."""
    fresh.start(fresh.prefill(**OVER_TCP), fresh.decode(**OVER_TCP))
    return fresh


async def stop_reader(agents: Started, source: Engine, target: Engine) -> tuple[Offer, Fetch]:
    """Stop the decode agent in the middle of a READ, until the prefill agent drives nothing."""
    prefill, decode = agents.all
    while True:
        offer, fetch = await start_long_read(source, target)
        decode.signal(signal.SIGSTOP)
        if prefill.status()["counts"]["leases"]:
            break
        decode.signal(signal.SIGCONT)  # it had ended already
        await fetch.completed()
    prefill.says("lease.expired", offer_id=offer.offer_id)
    await until(lambda: not prefill.metric("progress_tokens"))
    return offer, fetch


async def test_the_blocks_of_a_reader_that_comes_back_late_are_free_without_another_handoff(
    agents: Started,
) -> None:
    prefill, decode = agents.all
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        offer, fetch = await stop_reader(agents, source, target)

        decode.signal(signal.SIGCONT)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()

        assert failure.code in LATE
        await offer.withdraw()
        await offer.released()
        await until(lambda: not prefill.metric("progress_tokens"))
        assert await works(source, target)


@pytest.mark.long
async def test_a_reader_that_comes_back_when_the_engine_is_gone_harms_nobody(
    agents: Started,
) -> None:
    prefill, decode = agents.all
    before = prefill.metric("registered_bytes")
    async with engine(
        DecodeSession, decode.attach, make_spec(groups=(LARGE,)), num_blocks=NUM_LARGE_BLOCKS
    ) as target:
        async with engine(
            PrefillSession,
            prefill.attach,
            make_spec(groups=(LARGE,)),
            num_blocks=NUM_LARGE_BLOCKS,
            seed=3,
        ) as source:
            _, fetch = await stop_reader(agents, source, target)
        await until(lambda: prefill.metric("registered_bytes") == before)

        decode.signal(signal.SIGCONT)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        async with engine(
            PrefillSession,
            prefill.attach,
            make_spec(groups=(LARGE,)),
            num_blocks=NUM_LARGE_BLOCKS,
            seed=4,
        ) as source:
            assert await works(source, target)

    assert prefill.alive
    assert failure.code in (*LATE, ErrorCode.ENGINE_LOST)
