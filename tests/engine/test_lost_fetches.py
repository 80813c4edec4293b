"""Blocks of a fetch whose session is lost are free only when nothing can write into them."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.engine import AgentRanks, Fetch
from kvbus.errors import ClosedError, FetchFailed, KVBusError, PeerLost
from kvbus.memory.attach import AttachClient
from kvbus.protocol import BlocksFreed
from tests.agents import until
from tests.engine.recording import RecordingDecode, failed

pytestmark = pytest.mark.anyio

OTHERS = {"tcp://10.0.0.2:7501": (1,)}
ACCESS = "access-to-ranks-elsewhere"
GONE = PeerLost("the agent is gone")
CLOSED = ClosedError("the session was closed")
SOON_S = 1.0
HANGS_UP = """
import socket, sys
door = socket.socket(socket.AF_UNIX)
door.bind(sys.argv[1])
door.listen()
print("listens", flush=True)
door.accept()[0].close()
sys.stdin.read()
"""


async def fetching(others: Any = ()) -> tuple[RecordingDecode, Fetch]:
    session = RecordingDecode()
    await session.register(others=others, access=ACCESS)
    return session, session.fetch({}, num_tokens=0, block_ids={})


async def failure_of(fetch: Fetch) -> FetchFailed:
    with pytest.raises(FetchFailed) as failure:
        await fetch.completed()
    return failure.value


async def test_blocks_are_free_when_the_only_agent_is_gone() -> None:
    session, fetch = await fetching()

    session.lose(GONE)

    failure = await failure_of(fetch)
    assert (failure.stage, failure.blocks_free) == ("lost", True)
    await fetch.blocks_freed()


@pytest.mark.parametrize(("others", "error"), [(OTHERS, GONE), (OTHERS, CLOSED), ((), CLOSED)])
async def test_blocks_that_somebody_may_still_write_are_never_said_to_be_free(
    others: Any, error: KVBusError
) -> None:
    session, fetch = await fetching(others)

    session.lose(error)

    failure = await failure_of(fetch)
    assert (failure.stage, failure.code, failure.blocks_free) == ("lost", error.code, False)
    with pytest.raises(type(error)):
        await fetch.blocks_freed()


@pytest.fixture
def hanging_up(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Who hangs up on the one that attaches, and lives on."""
    path = tmp_path / "attach.sock"
    command = [sys.executable, "-c", HANGS_UP, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout
        assert agent.stdout.readline()
        yield path, agent
        agent.kill()


async def test_a_fetch_that_is_begun_while_its_agent_ends_waits_for_that_end(
    hanging_up: tuple[Path, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus.engine.session.ENDS_WITHIN_S", SOON_S)
    monkeypatch.setattr("kvbus.engine.decode.DOUBT_S", 60.0)
    session, (path, agent) = RecordingDecode(), hanging_up
    await session.register()
    session._attach = AttachClient(path)
    async with session._attach, anyio.create_task_group() as tasks:
        tasks.start_soon(session._watch)
        await session._attach.closed.wait()
        await anyio.wait_all_tasks_blocked()
        hung_up_at = time.monotonic()
        fetch = session.fetch({}, num_tokens=0, block_ids={})
        await until(lambda: time.monotonic() > hung_up_at + 2 * SOON_S)
        assert session.lost is None

        agent.kill()
        failure = await failure_of(fetch)

    assert (failure.stage, failure.blocks_free) == ("lost", True)


async def test_a_draining_fetch_of_a_spread_engine_stays_in_doubt_when_its_home_is_lost() -> None:
    session, fetch = await fetching(OTHERS)
    session.notice(failed(fetch.fetch_id, blocks_free=False))

    session.lose(GONE)

    failure = await failure_of(fetch)
    assert (failure.stage, failure.blocks_free) == ("reading", False)
    with pytest.raises(PeerLost):
        await fetch.blocks_freed()


@pytest.mark.parametrize("blocks_free", [True, False])
async def test_blocks_that_the_home_said_are_free_stay_so_after_its_end(blocks_free: bool) -> None:
    session, fetch = await fetching(OTHERS)
    session.notice(failed(fetch.fetch_id, blocks_free=blocks_free))
    if not blocks_free:
        session.notice(BlocksFreed(fetch.fetch_id))

    session.lose(GONE)

    assert (await failure_of(fetch)).blocks_free is blocks_free
    await fetch.blocks_freed()


@pytest.mark.parametrize(
    "others",
    [OTHERS, [AgentRanks("tcp://10.0.0.2:7501", (1,), ACCESS)], {"tcp://10.0.0.2:7501": [1]}],
)
async def test_the_other_agents_are_named_when_the_control_session_registers(others: Any) -> None:
    session, _ = await fetching(others)

    assert session.sent[0].others == (AgentRanks("tcp://10.0.0.2:7501", (1,), ACCESS),)
    assert session.sent[0].rank is None
