"""Blocks of reads that never end come back, with nothing in flight: NIXL is made anew.

That nothing lands then is shown in `tests/transport/test_recycling.py` as well.
"""

import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvbus.engine import Fetch, Offer
from kvbus.errors import ErrorCode, FetchFailed
from tests.agents import AgentProcess
from tests.engines import (
    NUM_LARGE_BLOCKS,
    Engine,
    failure_of,
    pair,
    start_long_read,
    works,
)
from tests.faults.conftest import LONG, LONG_TOKENS, ONE_POST, SLOW_READS, Started

pytestmark = pytest.mark.anyio

FABRICS = {"tcp": {"UCX_TLS": "tcp"}, "shared memory": {"UCX_TLS": "^cma"}}
"""With CMA the reader does all itself, and no peer holds it up."""
EXIT_STATUS = 75
FEW = 16
"""Descriptors: all of these are in use. With fewer, ZeroMQ cannot poll its sockets, and aborts."""


@dataclass
class Stuck:
    """A read of an agent that was stopped."""

    prefill: AgentProcess
    decode: AgentProcess
    source: Engine
    target: Engine
    offer: Offer
    fetch: Fetch

    async def failure(self) -> FetchFailed:
        failure = await failure_of(self.fetch)
        assert (failure.stage, failure.blocks_free) == ("reading", False)
        assert failure.code in (ErrorCode.TIMEOUT, ErrorCode.LEASE_EXPIRED)
        assert self.decode.metric("quarantined_blocks") == NUM_LARGE_BLOCKS
        return failure

    async def let_go_on(self) -> None:
        self.prefill.signal(signal.SIGCONT)
        await self.offer.withdraw()
        await self.offer.ended


@asynccontextmanager
async def stuck(
    fresh: Started, *, fabric: str = "tcp", when: str = "within"
) -> AsyncIterator[Stuck]:
    """Stopped while it is read slice by slice, or before, by one post that reads ahead."""
    posts = ONE_POST if when == "before" else SLOW_READS
    settings: dict[str, Any] = {**posts, "env": FABRICS[fabric]}
    prefill, decode = fresh.both(decode={"quarantine_timeout_s": 2.0}, **settings)
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        if when == "within":
            offer, fetch = await start_long_read(source, target)
            prefill.signal(signal.SIGSTOP)
        else:
            assert await works(source, target)
            theirs, ours = source.some_blocks(5, LONG_TOKENS), target.some_blocks(6, LONG_TOKENS)
            offer = await source.prefill.offer("r", num_tokens=LONG_TOKENS, block_ids=theirs)
            prefill.signal(signal.SIGSTOP)
            fetch = target.decode.fetch(
                offer.ticket, num_tokens=LONG_TOKENS, block_ids=ours, timeout_s=1.0
            )
        yield Stuck(prefill, decode, source, target, offer, fetch)


@pytest.mark.parametrize(
    ("fabric", "when"),
    [
        ("tcp", "within"),
        ("shared memory", "before"),
    ],
)
async def test_the_blocks_of_a_stuck_read_come_back_and_nothing_lands_when_its_agent_goes_on(
    fresh: Started, fabric: str, when: str
) -> None:
    async with stuck(fresh, fabric=fabric, when=when) as read:
        await read.failure()
        await read.fetch.freed
        names = ("outstanding_handles", "recycled_transports")
        handles, recycled = map(read.decode.metric, names)
        freed = read.target.snapshot()
        await read.let_go_on()

        assert (handles, recycled) == (0, 1)
        assert read.decode.says("transport.recycled")
        assert await works(read.source, read.target, before=freed)
        assert await works(read.source, read.target, LONG_TOKENS)
    assert read.prefill.alive
    assert read.decode.alive


async def test_an_agent_that_cannot_make_nixl_anew_ends_to_be_started_again(fresh: Started) -> None:
    async with stuck(fresh) as read:
        read.decode.expected_trouble |= {"transport.stuck", "descriptors.exhausted"}
        await read.failure()
        _, most = resource.prlimit(read.decode.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(read.decode.pid, resource.RLIMIT_NOFILE, (FEW, most))
        status = read.decode.exit_status()
        await read.fetch.freed
        read.prefill.kill()  # one that went on might be aborted by UCX, as a reader died meanwhile

        assert status == EXIT_STATUS
        assert read.decode.logged("transport.stuck", exit_status=EXIT_STATUS)
