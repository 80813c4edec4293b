"""A decode agent is killed, and its fetches complete with the next process of it.

The links of these engines check that nothing lands in blocks that are free.
"""

import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from kvbus.engine import Outcome, Rendezvous
from kvbus.errors import ErrorCode
from tests.process.faults.conftest import LONG, LONG_TOKENS, SLOW_READS, Started
from tests.support.agents import AgentProcess, until
from tests.support.engines import (
    Engine,
    Handoff,
    begin,
    engine,
    failure_of,
    make_spec,
    pair,
    same,
    spread_engine,
    start_long_read,
    works,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

NUM_KILLS, NUM_WORKERS = 6, 4
WITHIN_S = 60.0


async def restart(agent: AgentProcess) -> None:
    agent.kill()
    await anyio.to_thread.run_sync(agent.start)


async def ended_well(handoff: Handoff) -> None:
    """All bytes are right, however often they were read."""
    fetched = await handoff.fetch.ended
    assert fetched.outcome is Outcome.COMPLETED
    assert same(handoff.target.snapshot(), handoff.wanted), "the bytes are wrong"
    assert await handoff.offer.ended is Outcome.COMPLETED


async def test_a_fetch_that_waits_for_tokens_survives_its_agent(fresh: Started) -> None:
    prefill, decode = fresh.both()
    async with pair(prefill.attach, decode.attach) as (source, target):
        handoff = await begin(source, target, ready=16, chunk_tokens=16)
        await until(lambda: prefill.metric("leases") == 1)
        await restart(decode)
        await handoff.seal()

        await ended_well(handoff)


@pytest.mark.parametrize("num_kills", [1, 3])
async def test_reading_fetch_survives_any_number_of_agent_kills(
    fresh: Started, num_kills: int
) -> None:
    prefill, decode = fresh.both(**SLOW_READS)
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        wanted = source.views_of(source.snapshot())
        offer, fetch = await start_long_read(source, target)
        for _ in range(num_kills):
            await restart(decode)
            await until(lambda: fetch.notice or decode.metric("data_jobs") > 0, WITHIN_S)
        fetched = await fetch.ended
        theirs, ours = (
            one.some_blocks(seed, LONG_TOKENS) for one, seed in ((source, 5), (target, 6))
        )

        assert fetched.outcome is Outcome.COMPLETED
        assert await offer.ended is Outcome.COMPLETED
        for key, view in target.views().items():
            assert view[ours["full"]].equal(wanted[key][theirs["full"]])


async def test_rendezvous_survives_its_agent_before_offer_is_made(fresh: Started) -> None:
    prefill, decode = fresh.both()
    async with pair(prefill.attach, decode.attach) as (source, target):
        name = uuid.uuid4().hex
        meets = Rendezvous(name, prefill.peer).to_json()
        blocks = target.some_blocks(4, 40)
        fetch = target.decode.fetch(meets, num_tokens=40, block_ids=blocks, timeout_s=WITHIN_S)
        await until(lambda: decode.status()["counts"]["fetches"] == 1)
        await restart(decode)
        theirs = source.some_blocks(3, 40)
        offer = source.prefill.offer(name, num_tokens=40, block_ids=theirs, transfer_id=name)

        assert (await fetch.ended).outcome is Outcome.COMPLETED
        assert await offer.ended is Outcome.COMPLETED


@pytest.mark.parametrize("how", ["cancelled", "overdue"])
async def test_fetch_ended_while_agent_is_away_frees_blocks_for_good(
    fresh: Started, how: str
) -> None:
    prefill, decode = fresh.both(**SLOW_READS)
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        timeout_s = WITHIN_S if how == "cancelled" else 3.0
        offer, fetch = await start_long_read(source, target, timeout_s=timeout_s)
        decode.kill()
        if how == "cancelled":
            await until(lambda: not target.control.is_open)
            fetch.cancel()
        failure = await failure_of(fetch)
        await fetch.freed
        await anyio.to_thread.run_sync(decode.start)
        await until(lambda: target.control.num_opened == 2)
        await offer.withdraw()

        assert failure.code == (ErrorCode.CANCELLED if how == "cancelled" else ErrorCode.PEER_LOST)
        assert failure.stage == "lost"
        assert await works(source, target)


async def test_no_fetch_fails_while_its_agent_is_killed_repeatedly(fresh: Started) -> None:
    """Each kill comes at another point of the fetches that are under way."""
    prefill, decode = fresh.both(decode={"mapped": True})
    num_completed, is_over = 0, False

    async with pair_of_workers(prefill, decode) as pairs:

        async def work(source: Engine, target: Engine) -> None:
            nonlocal num_completed
            while not is_over:
                await ended_well(await begin(source, target))
                num_completed += 1

        async with anyio.create_task_group() as tasks:
            for one in pairs:
                tasks.start_soon(work, *one)
            for number in range(NUM_KILLS):
                wanted = num_completed + 5 + number
                await until(lambda wanted=wanted: num_completed >= wanted, WITHIN_S)  # type: ignore[misc]
                await restart(decode)
            wanted = num_completed + 10
            await until(lambda: num_completed >= wanted, WITHIN_S)
            is_over = True


@asynccontextmanager
async def pair_of_workers(
    prefill: AgentProcess, decode: AgentProcess
) -> AsyncIterator[list[tuple[Engine, Engine]]]:
    async with (
        pair(prefill.attach, decode.attach) as first,
        pair(prefill.attach, decode.attach) as second,
        pair(prefill.attach, decode.attach) as third,
    ):
        yield [first, second, third]


async def test_killed_home_ends_parts_it_had_asked_for(fresh: Started) -> None:
    prefill = fresh.prefill(**SLOW_READS)
    home, other = decode = [fresh.decode(**SLOW_READS) for _ in range(2)]
    fresh.start(prefill, *decode)
    theirs, ours = (make_spec(groups=LONG["groups"], tp=2) for _ in range(2))
    num_blocks = LONG["num_blocks"]
    async with (
        engine(prefill.attach, theirs, num_blocks=num_blocks, seed=1) as source,
        spread_engine(decode, ours, num_blocks=num_blocks, seed=2) as target,
    ):
        offer, fetch = await start_long_read(source, target)
        await until(lambda: other.metric("data_jobs") > 0)
        prefill.signal(signal.SIGSTOP)  # what is read does not end
        await restart(home)
        await until(lambda: other.logged("handoff.cancelled"), WITHIN_S)
        has_ended = fetch.ended.done()
        prefill.signal(signal.SIGCONT)

        assert not has_ended
        assert (await fetch.ended).outcome is Outcome.COMPLETED
        assert await offer.ended is Outcome.COMPLETED
        assert other.status()["counts"]["parts"] == 0
