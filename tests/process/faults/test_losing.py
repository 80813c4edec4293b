"""The SDK and the agents while an agent is dead or stopped.

`tests/process/handoffs/test_ends.py` ends handoffs in the middle, on each path.
"""

import asyncio
import signal
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from kvbus.engine import Fetch, Link, Offer, Outcome
from kvbus.engine.bounce import HostBuffer, HostLink, HostPool, LocalCopier
from kvbus.errors import AgentHungUp, ErrorCode
from kvbus.lab.lab_engine import device_copy
from tests.process.faults.conftest import LONG, LONG_TOKENS, ONE_POST, SLOW_READS, Started
from tests.support.agents import AgentProcess, until
from tests.support.engines import (
    LARGE,
    NOTHING,
    NUM_LARGE_BLOCKS,
    ONE_BLOCK,
    engine,
    failure_of,
    make_spec,
    pair,
    rank_link,
    start_long_read,
    works,
)
from tests.support.memories import Memory, private_cache

pytestmark = pytest.mark.anyio


async def test_fetches_of_stopped_agent_end_and_report_free_blocks_later(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    """``late`` is reported before its blocks are free, ``both`` when they are."""
    async with pair(prefill.attach, decode.attach) as (source, target):
        link = target.control
        offers = [await source.prefill.offer(name, **NOTHING, sealed=False) for name in "rs"]
        late, both = (
            link.fetch(offer.ticket, **ONE_BLOCK, timeout_s=timeout_s)
            for offer, timeout_s in zip(offers, (0.5, 8.0), strict=True)
        )
        assert link.ended() == []
        decode.signal(signal.SIGSTOP)
        await until(late.ended.done)
        first = link.ended()
        assert not late.are_blocks_free
        await until(both.ended.done)
        decode.signal(signal.SIGCONT)
        await until(lambda: late.freed.done() and both.freed.done())
        told_early = late.are_blocks_free
        second = link.ended()
        assert (first, second) == ([late], [both, late])
        assert not told_early, "a report stays as it is until the next one"
        assert late.are_blocks_free
        assert both.are_blocks_free
        assert link.ended() == []
        failure = await failure_of(late)
        assert (failure.code, failure.stage) == (ErrorCode.TIMEOUT, "silent")
        assert not failure.blocks_free
        assert "not known" in failure.message
        for offer in offers:
            await offer.withdraw()


async def test_calls_return_in_any_thread_and_loop_with_stopped_agents(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    """A call that waited for an agent would never return."""
    both = prefill, decode
    async with pair(*(agent.attach for agent in both)) as (source, target):
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)
        ticket = offer.ticket
        for agent in both:
            agent.signal(signal.SIGSTOP)

        def make_calls(name: str) -> tuple[Offer, Fetch]:
            given_up = source.prefill.offer(name, **ONE_BLOCK)
            fetch = target.decode.fetch(ticket, **ONE_BLOCK)
            waits = [offer.extend(0), given_up.withdraw(), fetch.cancel()]
            target.decode.release({**ticket, "offer_id": "another"})
            for link in (source.prefill, target.decode):
                assert link.ended() == []
            assert not any(one.done() for one in waits)
            return given_up, fetch

        async def make_calls_in_a_loop() -> tuple[Offer, Fetch]:
            return make_calls("in a loop")

        made = [
            make_calls("here"),
            await anyio.to_thread.run_sync(make_calls, "in a thread"),
            await anyio.to_thread.run_sync(asyncio.run, make_calls_in_a_loop()),
        ]
        sealed = offer.seal()
        for agent in both:
            agent.signal(signal.SIGCONT)
        for given_up, fetch in made:
            assert await given_up.ended is Outcome.WITHDRAWN
            assert (await failure_of(fetch)).code is ErrorCode.CANCELLED
        await sealed
        await offer.withdraw()


async def test_blocks_stay_in_doubt_when_live_agent_hangs_up_on_engine(fresh: Started) -> None:
    prefill, decode = fresh.both(**SLOW_READS)
    theirs, ours = (make_spec(groups=(LARGE,)) for _ in range(2))
    large: dict[str, Any] = {
        "num_tokens": LONG_TOKENS,
        "block_ids": {"full": list(range(NUM_LARGE_BLOCKS))},
    }
    async with (
        engine(prefill.attach, theirs, num_blocks=NUM_LARGE_BLOCKS) as source,
        AsyncExitStack() as leave,
    ):
        rank, _ = rank_link(decode.attach, ours, 0, num_blocks=NUM_LARGE_BLOCKS)
        async with rank:
            control = await leave.enter_async_context(Link(decode.attach, ours))
            offer = await source.prefill.offer("r", **large)
            fetch = control.fetch(offer.ticket, **large)
            await until(lambda: decode.metric("data_jobs") > 0)
        failure = await failure_of(fetch)  # a rank has left, and with it the engine
        with pytest.raises(AgentHungUp):
            await fetch.freed
        assert (failure.stage, failure.code) == ("lost", ErrorCode.PEER_LOST)
        assert not failure.blocks_free
        await offer.withdraw()


async def test_host_blocks_in_doubt_are_logged_and_not_given_away(
    prefill: AgentProcess, decode: AgentProcess, caplog: pytest.LogCaptureFixture
) -> None:
    spec, sizes = make_spec(), {"full": 4}
    pool, buffer = HostPool(sizes), HostBuffer(spec, 0, sizes)
    copier = LocalCopier([buffer], device_copy([private_cache(spec, 0, Memory(), 4)]))
    rank = Link(decode.attach, spec, memory=buffer.memory, control=False)
    async with engine(prefill.attach) as source, AsyncExitStack() as leave:
        async with rank:
            control = await leave.enter_async_context(Link(decode.attach, spec))
            offer = await source.prefill.offer("r", **NOTHING, sealed=False)
            fetch = HostLink(control, pool, copier).fetch(offer.ticket, **ONE_BLOCK)
            await until(lambda: decode.status()["counts"]["fetches"])
        await failure_of(fetch)  # a rank has left, and with it the engine
        await until(lambda: "host blocks are lost" in caplog.text)
        assert f"{fetch.fetch_id}: its 1 host blocks" in caplog.text
        assert pool.num_held == 1
        await offer.withdraw()


async def test_blocks_are_free_once_agent_awaiting_transfers_has_ended(fresh: Started) -> None:
    prefill, decode = fresh.both(SLOW_READS, {**SLOW_READS, "drain_timeout_s": 0.2})
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        _, fetch = await start_long_read(source, target)
        prefill.signal(signal.SIGSTOP)  # what was posted does not end
        decode.signal(signal.SIGTERM)
        failure = await failure_of(fetch)
        await fetch.freed
        decode_lives = decode.alive
        prefill.kill()  # UCX might abort it, as its reader has died
        assert (failure.code, failure.blocks_free) == (ErrorCode.DRAINING, False)
        assert not decode_lives


async def test_reader_resuming_its_undriven_read_does_no_harm(fresh: Started) -> None:
    """Its read ends without another handoff, which would drive the prefill agent."""
    prefill, decode = fresh.both(**ONE_POST)
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        while True:
            offer, fetch = await start_long_read(source, target)
            decode.signal(signal.SIGSTOP)
            if prefill.status()["counts"]["leases"]:
                break
            decode.signal(signal.SIGCONT)  # it had ended already
            await fetch.ended
        prefill.says("lease.expired", offer_id=offer.offer_id)
        await until(lambda: not prefill.metric("progress_tokens"))
        decode.signal(signal.SIGCONT)
        await fetch.ended
        await offer.ended
        assert decode.logged("handoff.completed")[-1]["attempts"] > 1
        assert await works(source, target)
