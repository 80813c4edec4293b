"""Engines continue to hand over while their agents restart or crash.

``KVBUS_RESTARTS=20`` sets the number of restarts of each kind. The engines' links check that
nothing lands in free blocks.
"""

import fcntl
import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.engine import Outcome, Rendezvous
from kvbus.errors import ErrorCode
from kvbus.spawn import free_port
from tests.process.faults.conftest import (
    LONG,
    LONG_TOKENS,
    SLOW_READS,
    Started,
    end_offer,
    works_again,
)
from tests.support.agents import AgentProcess, until
from tests.support.engines import (
    NOTHING,
    ONE_BLOCK,
    Engine,
    Handoff,
    begin,
    blocks_between,
    engine,
    hand_over,
    make_spec,
    pair,
    spread_engine,
    start_long_read,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1800)]

NUM_RESTARTS = int(os.environ.get("KVBUS_RESTARTS", "2"))
NUM_PAIRS, MORE, WITHIN_S = 3, 8, 60.0
HOME, OTHER = 0, 1
LONG_RUN = pytest.mark.long


async def kill_and_start(agent: AgentProcess) -> None:
    agent.kill()
    await anyio.to_thread.run_sync(agent.start)


async def end_and_start(agent: AgentProcess) -> None:
    agent.signal(signal.SIGTERM)
    assert await anyio.to_thread.run_sync(agent.exit_status) == 0
    await anyio.to_thread.run_sync(agent.start)


async def read_whole(handoff: Handoff) -> None:
    """The bytes are right. A prefill agent killed before its report leaves the offer as it was."""
    await handoff.fetch.ended
    assert handoff.has_landed()
    await end_offer(handoff.offer)


@pytest.mark.parametrize("mapped", [pytest.param(False, marks=LONG_RUN), True])
async def test_no_handoff_fails_while_agents_restart_and_crash(
    fresh: Started, mapped: bool
) -> None:
    """A draining agent finishes its work, and the engines wait for the next one."""
    prefill, decode = fresh.both(decode={"mapped": mapped})
    num_completed, is_over, prefill_crashes, decode_crashes = 0, False, False, False

    async def work(source: Engine, target: Engine) -> None:
        nonlocal num_completed
        while not is_over:
            handoff = await begin(source, target, timeout_s=WITHIN_S)
            await handoff.fetch.ended
            if prefill_crashes:  # by now: what was read before a crash may be read again
                await read_whole(handoff)
            else:
                await handoff.completed(by_earlier_agent=decode_crashes)
            num_completed += 1

    async def more_complete(more: int) -> None:
        wanted = num_completed + more
        await until(lambda: num_completed >= wanted, WITHIN_S)

    async with AsyncExitStack() as stack:
        attach = prefill.attach, decode.attach
        pairs = [
            await stack.enter_async_context(pair(*attach, agent_wait_s=WITHIN_S))
            for _ in range(NUM_PAIRS)
        ]
        async with anyio.create_task_group() as tasks:
            for one in pairs:
                tasks.start_soon(work, *one)
            for agent in (prefill, decode):
                await more_complete(MORE)
                await end_and_start(agent)
            decode_crashes = True
            for number in range(NUM_RESTARTS):  # each at another point of the fetches
                await more_complete(MORE + number)
                await kill_and_start(decode)
            await more_complete(MORE)
            prefill_crashes = True
            for _ in range(NUM_RESTARTS):
                await more_complete(MORE)
                await kill_and_start(prefill)
            await more_complete(MORE)
            is_over = True


async def test_requests_behind_gpu_work_continue_at_the_next_agent(fresh: Started) -> None:
    """The links publish them again; readers find the offers when the work has ended."""
    prefill, decode = fresh.both()
    attach, step = (prefill.attach, decode.attach), 512
    async with pair(*attach, agent_wait_s=WITHIN_S) as (source, target):
        link = source.control
        for number in range(1, 3):
            handoff = await begin(source, target, 40, ready=16, timeout_s=WITHIN_S)
            made = link.offer(f"made-{number}", after=2 * number * step, **ONE_BLOCK)
            await handoff.grow(24)
            more = blocks_between(source.spec, handoff.theirs, 24, 40)
            extended = handoff.offer.extend(40, more, after=2 * number * step)
            sealed = handoff.offer.seal()
            await kill_and_start(prefill)
            link.record((2 * number - 1) * step)
            await until(lambda: prefill.status()["counts"]["waiting_requests"] == 4, WITHIN_S)
            waits = [one.done() for one in (made.made, extended, sealed, handoff.fetch.ended)]
            assert waits == [False] * 4
            link.record(2 * number * step)
            await extended
            await sealed
            await read_whole(handoff)  # it may read blocks again
            await made
            await end_offer(made)


NAME_SERVER = """
import os, socket
known = socket.getaddrinfo
def look_up(host, *more, **options):
    with open(os.environ["MOVING_ADDRESS"]) as file:
        return known(file.read() if host == "moving.test" else host, *more, **options)
socket.getaddrinfo = look_up
"""
"""Python runs it at the start of an agent with a name server of its own."""


@pytest.mark.parametrize("earlier", [pytest.param("ends", marks=LONG_RUN), "lives on"])
async def test_no_fetch_fails_when_name_leads_to_other_prefill_agent(
    fresh: Started, tmp_path: Path, earlier: str
) -> None:
    """Like a pod that restarts while another agent has its earlier address."""
    ports = [free_port() for _ in range(2)]

    def prefill(address: str) -> AgentProcess:
        binds = (f"tcp://{address}:{port}" for port in ports)
        named: dict[str, Any] = {"advertise_host": "moving.test", "data_interfaces": ["lo"]}
        named |= zip(("peer_bind", "events_bind"), binds, strict=True)
        agent: AgentProcess = fresh.prepare("prefill", agent_id="p", insecure=True, **named)
        return agent

    names = tmp_path / "address"
    names.write_text("127.0.0.1")
    (tmp_path / "sitecustomize.py").write_text(NAME_SERVER)
    python_path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    env = {"MOVING_ADDRESS": str(names), "PYTHONPATH": python_path}
    first, second, decode = (
        prefill("127.0.0.1"),
        prefill("127.0.0.2"),
        fresh.prepare("decode", env=env),
    )
    fresh.start(first, second, decode)
    for agent in (first, second):  # only the decode agent knows the name
        agent.started["peer"] = agent.settings["peer_bind"]
    async with engine(decode.attach, seed=1) as target:
        async with engine(first.attach, seed=2) as source:
            await hand_over(source, target)
        if earlier == "ends":
            first.kill()
        names.write_text("127.0.0.2")
        async with engine(second.attach, seed=3) as source:
            for _ in range(MORE):
                await hand_over(source, target)
    assert decode.says("peer.moved", address=f"tcp://127.0.0.2:{ports[0]}")


@pytest.fixture
def full_pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    os.write(writing, bytes(fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)))
    yield writing
    os.close(writing)
    os.close(reading)


async def test_agent_serves_and_ends_while_its_stderr_is_full_pipe(
    fresh: Started, prefill: AgentProcess, full_pipe: int
) -> None:
    decode = fresh.prepare("decode", log_level="debug")
    to_pipe = f'exec "$@" 2> /proc/{os.getpid()}/fd/{full_pipe}'
    decode.runner = ("sh", "-c", to_pipe, "sh")
    decode.launch()
    attach = decode.folder / "run" / "attach.sock"
    await until(attach.exists)
    async with pair(prefill.attach, attach) as engines:
        await hand_over(*engines)
        assert decode.page("/healthz") == (200, "ok\n")
    decode.signal(signal.SIGTERM)
    assert await anyio.to_thread.run_sync(decode.exit_status) == 0


@pytest.mark.parametrize("mapped", [False, pytest.param(True, marks=LONG_RUN)])
async def test_tickets_and_waiting_fetches_outlive_either_agent(
    fresh: Started, mapped: bool
) -> None:
    prefill, decode = fresh.both(decode={"mapped": mapped})
    async with pair(prefill.attach, decode.attach) as (source, target):
        await hand_over(source, target)
        blocks = source.whole_blocks(3, 40)
        sealed = await source.prefill.offer("sealed", num_tokens=40, block_ids=blocks)
        await kill_and_start(prefill)
        await read_whole(await begin(source, target, offer=sealed, timeout_s=WITHIN_S))
        grows = await begin(source, target, ready=10, timeout_s=WITHIN_S)
        await until(lambda: prefill.status()["counts"]["leases"] == 1)
        prefill.kill()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(grows.seal, 20)
            await anyio.to_thread.run_sync(prefill.start)
        await read_whole(grows)
        waits = await begin(source, target, ready=16, chunk_tokens=16)
        await until(lambda: prefill.status()["counts"]["leases"] == 1)
        await kill_and_start(decode)
        await waits.seal()
        await read_whole(waits)
        name = uuid.uuid4().hex
        ticket = Rendezvous(name, prefill.peer).to_json()
        ours, theirs = target.some_blocks(4, 40), source.some_blocks(3, 40)
        fetch = target.decode.fetch(ticket, num_tokens=40, block_ids=ours, timeout_s=WITHIN_S)
        await until(lambda: decode.status()["counts"]["fetches"] == 1)
        await kill_and_start(decode)
        offer = source.prefill.offer(name, num_tokens=40, block_ids=theirs, transfer_id=name)
        assert (await fetch.ended).outcome is Outcome.COMPLETED
        assert await offer.ended is Outcome.COMPLETED


async def test_offers_outlive_agents_and_each_end_is_reported_once(fresh: Started) -> None:
    both = fresh.both()
    async with pair(*(agent.attach for agent in both)) as (source, target):
        links = source.control, target.control
        assert [link.ended() for link in links] == [[], []]
        offers = [await source.prefill.offer(name, **NOTHING, sealed=False) for name in "rs"]
        fetches = [target.decode.fetch(offer.ticket, **ONE_BLOCK) for offer in offers]
        await until(lambda: both[1].status()["counts"]["fetches"] == len(fetches))
        for agent in both:
            agent.kill()
        await anyio.to_thread.run_sync(fresh.start, *both)
        await until(lambda: all(link.is_open and link.num_opened == 2 for link in links))
        assert links[0].ended() == []
        assert both[0].status()["counts"]["offers"] == len(offers)
        for offer in offers:
            await offer.withdraw()
        await until(lambda: all(offer.ended.done() for offer in offers))
        assert links[0].ended() == offers
        assert all(offer.outcome is Outcome.WITHDRAWN for offer in offers)
        await until(lambda: all(fetch.are_blocks_free for fetch in fetches))
        assert set(links[1].ended()) == set(fetches)
        assert {fetch.notice.code for fetch in fetches if fetch.notice} == {"offer_withdrawn"}
        assert [link.ended() for link in links] == [[], []]
        await works_again(source, target)


async def test_reading_fetch_survives_any_number_of_agent_kills(fresh: Started) -> None:
    prefill, decode = fresh.both(**SLOW_READS)
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        wanted = source.views_of(source.snapshot())
        offer, fetch = await start_long_read(source, target)
        for _ in range(3):
            await kill_and_start(decode)
            await until(lambda: fetch.notice or decode.metric("data_jobs") > 0, WITHIN_S)
        fetched = await fetch.ended
        theirs, ours = source.some_blocks(5, LONG_TOKENS), target.some_blocks(6, LONG_TOKENS)
        assert fetched.outcome is Outcome.COMPLETED
        assert await offer.ended is Outcome.COMPLETED
        for key, view in target.views().items():
            assert view[ours["full"]].equal(wanted[key][theirs["full"]])


async def test_killed_home_ends_parts_it_had_requested(fresh: Started) -> None:
    prefill = fresh.prepare("prefill", **SLOW_READS)
    home, other = decode = [fresh.prepare("decode", **SLOW_READS) for _ in range(2)]
    fresh.start(prefill, *decode)
    shape: dict[str, Any] = {"num_blocks": LONG["num_blocks"]}
    theirs, ours = (make_spec(groups=LONG["groups"], tp=2) for _ in range(2))
    async with (
        engine(prefill.attach, theirs, seed=1, **shape) as source,
        spread_engine(decode, ours, seed=2, **shape) as target,
    ):
        offer, fetch = await start_long_read(source, target)
        await until(lambda: other.metric("data_jobs") > 0)
        prefill.signal(signal.SIGSTOP)  # no read ends
        await kill_and_start(home)
        await until(lambda: other.logged("handoff.cancelled"), WITHIN_S)
        has_ended = fetch.ended.done()
        prefill.signal(signal.SIGCONT)
        assert not has_ended
        assert (await fetch.ended).outcome is Outcome.COMPLETED
        assert await offer.ended is Outcome.COMPLETED
        assert other.status()["counts"]["parts"] == 0


async def test_engine_at_several_agents_works_after_one_restarts(
    fresh: Started, prefill: AgentProcess
) -> None:
    decode = fresh.prepare("decode"), fresh.prepare("decode")
    fresh.start(*decode)
    async with (
        engine(prefill.attach, make_spec(tp=2), seed=1) as source,
        spread_engine(decode, seed=2) as target,
    ):
        for which, num_opened in ((OTHER, (1, 1, 2)), (HOME, (2, 2, 2))):
            await works_again(source, target)
            await kill_and_start(decode[which])
            await until(lambda at=which: target.links[at].num_opened == 2)  # type: ignore[misc]
            await works_again(source, target, ends=tuple(ErrorCode))
            opened = [one.num_opened for one in (target.control, *target.links)]
            assert opened == [*num_opened], "memory at the other agent stays registered"
