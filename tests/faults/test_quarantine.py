"""Blocks of reads that never end come back, with nothing in flight: NIXL is made anew."""

import resource
import signal
from typing import Any

import pytest

from kvbus.engine import DecodeSession, Fetch, Offer, PrefillSession
from kvbus.errors import ErrorCode, FetchFailed
from tests.agents import AgentProcess
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
from tests.faults.conftest import SLOW_READS, Started

pytestmark = pytest.mark.anyio

LONG: dict[str, Any] = {"groups": (LARGE,), "num_blocks": NUM_LARGE_BLOCKS}
ONE_POST: dict[str, Any] = {"transport": {"slice_bytes": 64 << 20, "slice_descriptors": 1 << 16}}
QUARANTINE_S = 2.0
FABRICS = {"tcp": {"UCX_TLS": "tcp"}, "shared memory": {"UCX_TLS": "^cma"}}
"""With CMA the reader does all itself, and no peer holds it up."""
EXIT_STATUS = 75
FEW = 16
"""Descriptors: all of these are in use. With fewer, ZeroMQ cannot poll its sockets, and aborts."""


def started(agents: Started, fabric: str, **settings: object) -> tuple[AgentProcess, AgentProcess]:
    settings = {"env": FABRICS[fabric], **settings}
    prefill = agents.prefill(**settings)
    decode = agents.decode(**settings, quarantine_timeout_s=QUARANTINE_S)
    agents.start(prefill, decode)
    return prefill, decode


async def stop_before(prefill: AgentProcess, source: Engine, target: Engine) -> tuple[Offer, Fetch]:
    """A fetch that reads ahead, all in one post, from an agent that is stopped already."""
    assert await works(source, target)
    num_tokens = NUM_LARGE_BLOCKS * LARGE.block_size
    theirs, ours = source.some_blocks(5, num_tokens), target.some_blocks(6, num_tokens)
    offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=theirs)
    prefill.signal(signal.SIGSTOP)
    fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours, timeout_s=1.0)
    return offer, fetch


async def stop_within(prefill: AgentProcess, source: Engine, target: Engine) -> tuple[Offer, Fetch]:
    """A fetch whose agent is stopped while it reads, slice by slice."""
    offer, fetch = await start_long_read(source, target)
    prefill.signal(signal.SIGSTOP)
    return offer, fetch


async def stuck_failure(decode: AgentProcess, fetch: Fetch) -> FetchFailed:
    failure = await failure_of(fetch)
    assert (failure.stage, failure.blocks_free) == ("reading", False)
    assert decode.metric("quarantined_blocks") == NUM_LARGE_BLOCKS
    return failure


@pytest.mark.parametrize(
    ("fabric", "when"),
    [
        ("tcp", "within"),
        ("shared memory", "before"),
        pytest.param("tcp", "before", marks=pytest.mark.long),
        pytest.param("shared memory", "within", marks=pytest.mark.long),
    ],
)
async def test_the_blocks_of_a_stuck_read_come_back_and_nothing_lands_when_its_agent_goes_on(
    fresh: Started, fabric: str, when: str
) -> None:
    posts, stop = (ONE_POST, stop_before) if when == "before" else (SLOW_READS, stop_within)
    prefill, decode = started(fresh, fabric, transport=posts["transport"])
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        offer, fetch = await stop(prefill, source, target)

        failure = await stuck_failure(decode, fetch)
        await fetch.blocks_freed()
        handles, recycled = (
            decode.metric(name) for name in ("outstanding_handles", "recycled_transports")
        )
        freed = target.snapshot()
        prefill.signal(signal.SIGCONT)
        await offer.withdraw()
        await offer.released()

        assert failure.code in (ErrorCode.TIMEOUT, ErrorCode.LEASE_EXPIRED)
        assert (handles, recycled) == (0, 1)
        assert decode.says("transport.recycled")
        assert await works(source, target, before=freed)
        assert await works(source, target, NUM_LARGE_BLOCKS * LARGE.block_size)
    assert prefill.alive
    assert decode.alive


@pytest.mark.long
async def test_a_handoff_with_another_agent_goes_on_across_it(fresh: Started) -> None:
    prefill, decode = started(fresh, "tcp", transport=SLOW_READS["transport"])
    other = fresh.prefill(env=FABRICS["tcp"], transport=SLOW_READS["transport"])
    fresh.start(other)
    async with (
        pair(prefill.attach, decode.attach, **LONG) as (source, target),
        engine(PrefillSession, other.attach, make_spec(), seed=3) as elsewhere,
        engine(DecodeSession, decode.attach, make_spec(), seed=4) as reader,
    ):
        offer, fetch = await stop_within(prefill, source, target)
        num_works = 0

        await stuck_failure(decode, fetch)
        while not decode.logged("transport.recycled"):
            assert await works(elsewhere, reader)
            num_works += 1
        await fetch.blocks_freed()

        assert num_works
        assert await works(elsewhere, reader)
        prefill.signal(signal.SIGCONT)
        await offer.withdraw()
        await offer.released()


async def test_an_agent_that_cannot_make_nixl_anew_ends_to_be_started_again(fresh: Started) -> None:
    prefill, decode = started(fresh, "tcp", transport=SLOW_READS["transport"])
    decode.expected_trouble |= {"transport.stuck", "descriptors.exhausted"}
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        _, fetch = await stop_within(prefill, source, target)

        await stuck_failure(decode, fetch)
        _, most = resource.prlimit(decode.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(decode.pid, resource.RLIMIT_NOFILE, (FEW, most))
        status = decode.exit_status()
        await fetch.blocks_freed()
        prefill.kill()  # one that went on might be aborted by UCX, as a reader died meanwhile

        assert status == EXIT_STATUS
        assert decode.logged("transport.stuck", exit_status=EXIT_STATUS)
