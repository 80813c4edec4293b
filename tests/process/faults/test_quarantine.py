"""Blocks of reads that never end return once the data process is replaced."""

import resource
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psutil
import pytest

from kvbus.engine import Fetch, Offer
from kvbus.errors import ErrorCode
from tests.process.faults.conftest import LONG, LONG_TOKENS, ONE_POST, SLOW_READS, Started
from tests.support.agents import until
from tests.support.engines import NUM_LARGE_BLOCKS, Engine, failure_of, pair, start_long_read, works
from tests.support.late_links import LINKED, late_link, look_past_link

pytestmark = pytest.mark.anyio

FABRICS = {"tcp": {"UCX_TLS": "tcp"}, "shared memory": {"UCX_TLS": "^cma"}}
"""With CMA the reader does all itself, and no peer holds it up."""
NUM_DRAINED, DRAIN_PERIOD_S = 5, 1.0
ROOM_BYTES = 4 << 20
"""Less than the stack of a thread has, 8 MiB."""


@contextmanager
def no_new_threads(pid: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    most = psutil.Process(pid).memory_info().vms + ROOM_BYTES
    resource.prlimit(pid, resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)


async def test_an_agent_copies_where_no_thread_can_be_started_any_more(fresh: Started) -> None:
    prefill, decode = fresh.both(decode={"copy_threads": 4}, mapped=True)
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        assert await works(source, target)
        with no_new_threads(decode.pid):
            for _ in range(2):
                assert await works(source, target, LONG_TOKENS // 2)
        assert decode.metric("data_jobs") == 0


@asynccontextmanager
async def stuck(
    fresh: Started, *, fabric: str = "tcp", when: str = "within"
) -> AsyncIterator[tuple[Engine, Engine, Offer, Fetch]]:
    """A failed read of an agent that stops within it, or before one speculative post.

    Its blocks are in quarantine.
    """
    posts = ONE_POST if when == "before" else SLOW_READS
    settings: dict[str, Any] = {**posts, "env": FABRICS[fabric]}
    prefill, decode = fresh.both(decode={"quarantine_timeout_s": 2.0}, **settings)
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        if when == "within":
            offer, fetch = await start_long_read(source, target)
            prefill.signal(signal.SIGSTOP)
            await fetch.cancel()
        else:
            assert await works(source, target)
            theirs, ours = source.some_blocks(5, LONG_TOKENS), target.some_blocks(6, LONG_TOKENS)
            offer = await source.prefill.offer("r", num_tokens=LONG_TOKENS, block_ids=theirs)
            prefill.signal(signal.SIGSTOP)
            fetch = target.decode.fetch(
                offer.ticket, num_tokens=LONG_TOKENS, block_ids=ours, timeout_s=1.0
            )
        failure = await failure_of(fetch)
        assert (failure.stage, failure.blocks_free) == ("reading", False)
        assert failure.code in (ErrorCode.TIMEOUT, ErrorCode.CANCELLED)
        assert decode.metric("quarantined_blocks") == NUM_LARGE_BLOCKS
        yield source, target, offer, fetch


@pytest.mark.parametrize(("fabric", "when"), [("tcp", "within"), ("shared memory", "before")])
async def test_stuck_read_frees_blocks_and_nothing_lands_on_resume(
    fresh: Started, fabric: str, when: str
) -> None:
    async with stuck(fresh, fabric=fabric, when=when) as (source, target, offer, fetch):
        prefill, decode = fresh.all
        await fetch.freed
        num_jobs, num_replaced = map(decode.metric, ("data_jobs", "data_replaced"))
        freed = target.snapshot()
        prefill.signal(signal.SIGCONT)
        await offer.withdraw()
        await offer.ended
        assert (num_jobs, num_replaced) == (0, 1)
        assert decode.says("data.replaced")
        assert await works(source, target, before=freed)
        assert await works(source, target, LONG_TOKENS)
    assert prefill.alive
    assert decode.alive


async def test_draining_reads_of_one_source_share_one_check_a_second(fresh: Started) -> None:
    prefill, decode = fresh.both(LINKED, **SLOW_READS)
    async with late_link(prefill) as link, pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        offers = [
            await source.prefill.offer(f"r{at}", num_tokens=16, block_ids={"full": [at]})
            for at in range(NUM_DRAINED)
        ]
        prefill.signal(signal.SIGSTOP)
        fetches = [
            target.decode.fetch(one.ticket, num_tokens=16, block_ids={"full": [at]}, timeout_s=1.0)
            for at, one in enumerate(offers)
        ]
        failures = [await failure_of(fetch) for fetch in fetches]
        began_at, before = time.monotonic(), link.counts["check"]
        await until(lambda: link.counts["check"] >= before + NUM_DRAINED)
        lasted_s, num_checks = time.monotonic() - began_at, link.counts["check"] - before
        prefill.signal(signal.SIGCONT)
        for fetch, offer in zip(fetches, offers, strict=True):
            await fetch.freed
            await offer.withdraw()
            await offer.ended
        look_past_link(prefill)
    assert not any(failure.blocks_free for failure in failures)
    assert num_checks <= 2 + lasted_s / DRAIN_PERIOD_S
