"""Engines hand over while their agents are started again, and need no restart.

With ``KVBUS_RESTARTS=20`` each agent is started again as often.
"""

import fcntl
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.engine import Link, Outcome
from kvbus.errors import ErrorCode, PeerLost
from kvbus.spawn import free_port
from tests.process.faults.conftest import NOTHING, ONE_BLOCK, Started, end_offer, works_again
from tests.support.agents import AgentProcess, until
from tests.support.engines import (
    Engine,
    Handoff,
    begin,
    engine,
    hand_over,
    make_spec,
    pair,
    rank_link,
    spread_engine,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1800)]

NUM_RESTARTS = int(os.environ.get("KVBUS_RESTARTS", "2"))
NUM_PAIRS, MORE, WITHIN_S = 4, 10, 60.0
WAIT_S = 0.3
HOME, OTHER = 0, 1


GoesOn = Callable[[], Awaitable[None]]


@asynccontextmanager
async def under_load(
    attach: Sequence[Path], hand_one: Callable[[Engine, Engine], Awaitable[object]], **options: Any
) -> AsyncIterator[GoesOn]:
    """Pairs of engines hand over until the block ends; it gets what waits for `MORE` of these."""
    num_completed, is_over = 0, False

    async def work(source: Engine, target: Engine) -> None:
        nonlocal num_completed
        while not is_over:
            await hand_one(source, target)
            num_completed += 1

    async def goes_on() -> None:
        wanted = num_completed + MORE
        await until(lambda: num_completed >= wanted, WITHIN_S)

    async with AsyncExitStack() as stack:
        pairs = [
            await stack.enter_async_context(pair(*attach, **options)) for _ in range(NUM_PAIRS)
        ]
        async with anyio.create_task_group() as tasks:
            for source, target in pairs:
                tasks.start_soon(work, source, target)
            yield goes_on
            await goes_on()
            is_over = True


async def test_no_handoff_fails_while_either_agent_is_started_again(fresh: Started) -> None:
    """An agent that is told to end has time to finish, and the engines wait for the next one."""
    both = fresh.both(decode={"mapped": True})

    async with under_load([agent.attach for agent in both], hand_over) as goes_on:
        for agent in both * NUM_RESTARTS:
            await goes_on()
            agent.signal(signal.SIGTERM)
            assert await anyio.to_thread.run_sync(agent.exit_status) == 0
            agent.launch()
            await anyio.to_thread.run_sync(agent.wait_started)

    assert not [line for agent in both for line in agent.logged("handoff.failed")]


NAME_SERVER = """
import os, socket
known = socket.getaddrinfo
def look_up(host, *more, **options):
    with open(os.environ["MOVING_ADDRESS"]) as file:
        return known(file.read() if host == "moving.test" else host, *more, **options)
socket.getaddrinfo = look_up
"""
"""What Python runs at the start of an agent that has a name server of its own."""


@pytest.mark.parametrize("earlier", ["ends", "lives on"])
async def test_no_fetch_fails_when_name_leads_to_other_prefill_agent(
    fresh: Started, tmp_path: Path, earlier: str
) -> None:
    """As with a pod that is started again. Another agent may have its earlier address by then."""
    ports = [free_port() for _ in range(2)]

    def prefill(address: str) -> AgentProcess:
        binds = (f"tcp://{address}:{port}" for port in ports)
        places = dict(zip(("peer_bind", "events_bind"), binds, strict=True))
        named = {"advertise_host": "moving.test", "data_interfaces": ["lo"], "insecure": True}
        return fresh.prefill(agent_id="prefill-0", **places, **named)

    names = tmp_path / "address"
    names.write_text("127.0.0.1")
    (tmp_path / "sitecustomize.py").write_text(NAME_SERVER)
    python_path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    env = {"MOVING_ADDRESS": str(names), "PYTHONPATH": python_path}
    first, second, decode = prefill("127.0.0.1"), prefill("127.0.0.2"), fresh.decode(env=env)
    fresh.start(first, second, decode)
    for agent in (first, second):  # nobody but the decode agent knows the name
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
    """The writing end of a pipe in which no byte has room."""
    reading, writing = os.pipe()
    os.write(writing, bytes(fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)))
    yield writing
    os.close(writing)
    os.close(reading)


async def test_agent_serves_and_ends_while_its_stderr_is_full_pipe(
    fresh: Started, full_pipe: int
) -> None:
    fresh.start(prefill := fresh.prefill())
    decode = fresh.decode(log_level="debug")
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


async def test_offer_awaiting_next_agent_fails_if_none_comes_in_time(fresh: Started) -> None:
    fresh.start(prefill := fresh.prefill())
    spec = make_spec()
    rank, _ = rank_link(prefill.attach, spec, 0)
    async with rank, Link(prefill.attach, spec, agent_wait_s=WAIT_S) as link:
        prefill.signal(signal.SIGTERM)
        assert await anyio.to_thread.run_sync(prefill.exit_status) == 0
        with pytest.raises(PeerLost, match="is gone"):
            await link.offer("r", num_tokens=0, block_ids={})


async def kill_and_start(agent: AgentProcess) -> None:
    agent.kill()
    await anyio.to_thread.run_sync(agent.start)


async def read_whole(handoff: Handoff) -> None:
    """It completes with the right bytes, and its offer ends.

    An agent that is killed between the yes and its report leaves the offer as it was.
    """
    await handoff.fetch.ended
    assert handoff.has_landed()
    await end_offer(handoff.offer)


@pytest.mark.parametrize("mapped", [False, True], ids=["by NIXL", "mapped"])
async def test_offers_of_killed_prefill_agent_are_read_from_next_one(
    fresh: Started, mapped: bool
) -> None:
    """By the same tickets: a sealed offer, and an open one that grows while there is no agent."""
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


@pytest.mark.parametrize("mapped", [False, True], ids=["by NIXL", "mapped"])
async def test_no_handoff_fails_while_prefill_agent_is_killed_and_back(
    fresh: Started, mapped: bool
) -> None:
    prefill, decode = fresh.both(decode={"mapped": mapped})

    async def hand_one(source: Engine, target: Engine) -> None:
        await read_whole(await begin(source, target, timeout_s=WITHIN_S))

    attach = prefill.attach, decode.attach
    async with under_load(attach, hand_one, agent_wait_s=WITHIN_S) as goes_on:
        for _ in range(2 * NUM_RESTARTS):
            await goes_on()
            await kill_and_start(prefill)


async def test_offers_outlive_agents_and_fetch_tells_free_blocks_once(
    fresh: Started,
) -> None:
    """Both links register with the agents that are started again."""
    both = fresh.both()
    async with pair(*(agent.attach for agent in both)) as (source, target):
        links = source.control, target.control
        assert [link.ended() for link in links] == [[], []]
        offers = [await source.prefill.offer(name, **NOTHING, sealed=False) for name in "rs"]
        fetches = [target.decode.fetch(offer.ticket, **ONE_BLOCK) for offer in offers]
        await until(lambda: both[1].status()["counts"]["fetches"] == len(fetches))

        for agent in both:
            agent.kill()
        for agent in both:
            await anyio.to_thread.run_sync(agent.start)
        await until(lambda: all(link.is_open and link.num_opened == 2 for link in links))

        assert links[0].ended() == []
        assert both[0].status()["counts"]["offers"] == len(offers)
        for offer in offers:
            await offer.withdraw()
        await until(lambda: all(offer.ended.done() for offer in offers))
        assert links[0].ended() == offers
        assert all(offer.outcome is Outcome.WITHDRAWN for offer in offers)
        for fetch in fetches:
            await until(lambda fetch=fetch: fetch.are_blocks_free)  # type: ignore[misc]
        assert links[1].ended() == fetches
        assert {fetch.notice.code for fetch in fetches if fetch.notice} == {"offer_withdrawn"}
        assert [link.ended() for link in links] == [[], []]
        await works_again(source, target)


@pytest.mark.parametrize("which", [HOME, OTHER], ids=["home", "other"])
async def test_engine_of_several_agents_goes_on_with_restarted_one(
    fresh: Started, which: int
) -> None:
    prefill, *decode = fresh.prefill(), fresh.decode(), fresh.decode()
    fresh.start(prefill, *decode)
    async with (
        engine(prefill.attach, make_spec(tp=2), seed=1) as source,
        spread_engine(decode, seed=2) as target,
    ):
        await hand_over(source, target)

        decode[which].kill()
        decode[which].start()
        await until(lambda: target.links[which].num_opened == 2)
        await works_again(source, target, ends=tuple(ErrorCode))

        assert target.links[1 - which].num_opened == 1, "the memory at the other stays registered"
        assert target.control.num_opened == (2 if which == HOME else 1)
