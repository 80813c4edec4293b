"""What a successor says of an agent that does not hand over, and who is none to ask."""

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import pytest

from kvbus.agent import check_room_beside, take_over
from kvbus.errors import ConfigError, ErrorCode, LocalError, ProtocolError
from kvbus.memory.attach import AttachServer
from kvbus.protocol import AgentRole, HandOver

pytestmark = pytest.mark.anyio
WANTED = HandOver(agent_id="a", role=AgentRole.PREFILL, agent_boot="b" * 32)
NOBODY = 65_534
STRANGER = """
import os, sys, anyio
from pathlib import Path
from kvbus.agent import take_over
from kvbus.errors import ConfigError
from kvbus.protocol import AgentRole
from kvbus.protocol import HandOver
wanted = HandOver(agent_id="a", role=AgentRole.PREFILL, agent_boot="b" * 32)
async def ask():
    try:
        await take_over(Path(sys.argv[1]), wanted, within_s=1.0)
    except ConfigError as error:
        print(error.message)
async def main():
    os.setuid(int(sys.argv[2]))
    await ask()
anyio.run(main)
"""


async def asked(
    answer: Callable[[], Awaitable[dict[str, Any]]], *, within_s: float = 5.0
) -> ConfigError:
    """Why an agent that answers like this is not replaced."""
    with TemporaryDirectory(prefix="kv-") as folder:
        path = Path(folder) / "attach.sock"
        server = AttachServer(path, lambda *_: answer(), lambda _: None)
        async with anyio.create_task_group() as tasks:
            await tasks.start(server.serve)
            with pytest.raises(ConfigError) as caught:
                await take_over(path, WANTED, within_s=within_s)
            tasks.cancel_scope.cancel()
    return caught.value


async def test_where_no_agent_is_there_is_nothing_to_take_over(tmp_path: Path) -> None:
    assert await take_over(tmp_path / "attach.sock", WANTED, within_s=5.0) is None


async def test_an_agent_of_a_version_that_cannot_hand_over_is_left_as_it_is() -> None:
    async def answer() -> dict[str, Any]:
        raise ProtocolError("no attach message 'hand_over'", code=ErrorCode.UNKNOWN_OP)

    error = await asked(answer)

    assert f"process {os.getpid()}" in error.message
    assert "start without --replace" in error.message


async def test_an_agent_that_is_busy_for_too_long_is_left_as_it_is() -> None:
    num_asked = 0

    async def answer() -> dict[str, Any]:
        nonlocal num_asked
        num_asked += 1
        raise LocalError("it waits itself", code=ErrorCode.BUSY)

    error = await asked(answer, within_s=0.7)

    assert "it waits itself" in error.message
    assert num_asked > 1


async def test_an_agent_that_gives_no_place_is_left_as_it_is() -> None:
    async def answer() -> dict[str, Any]:
        return {"agent_boot": "c" * 32, "peer_endpoint": "tcp://127.0.0.1:1"}

    error = await asked(answer)

    assert "hung up" in error.message


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
async def test_a_successor_of_another_user_takes_nothing_over() -> None:
    with TemporaryDirectory(prefix="kv-") as folder:
        path = Path(folder) / "attach.sock"
        server = AttachServer(path, _fail, lambda _: None)
        async with anyio.create_task_group() as tasks:
            await tasks.start(server.serve)
            await anyio.Path(folder).chmod(0o755)
            await anyio.Path(path).chmod(0o777)
            ended = await anyio.run_process(
                [sys.executable, "-c", STRANGER, str(path), str(NOBODY)], stderr=subprocess.STDOUT
            )
            tasks.cancel_scope.cancel()

    assert "uid 0" in ended.stdout.decode()


async def _fail(*_: object) -> dict[str, Any]:
    raise AssertionError("a stranger was heard")


@pytest.mark.parametrize(
    ("address", "example"),
    [("tcp://h:7701", "tcp://h:7701-7702"), ("tcp://h:65535", "tcp://HOST:7701-7702")],
)
def test_a_single_port_is_too_little_for_two_agents(address: str, example: str) -> None:
    with pytest.raises(ConfigError, match=example):
        check_room_beside(address, key="peer_bind")


@pytest.mark.parametrize("address", ["tcp://h:0", "tcp://h:7701-7702"])
def test_a_range_or_any_port_has_room_for_two(address: str) -> None:
    check_room_beside(address, key="peer_bind")
