"""The lifeline of an agent, between real processes."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import TypeAlias

import pytest

from kvbus.memory.attach import AgentLife, AttachClient
from kvbus.protocol import Hello, to_body
from tests.support.agents import started

pytestmark = pytest.mark.anyio

WITHIN_S = 30.0
AGENT = """
import signal, socket, subprocess, sys
from kvbus.memory.attach import Lifeline

lifeline, engine = Lifeline(), socket.socket(fileno=int(sys.argv[1]))
lives = [sys.executable, "-c", "import signal; signal.pause()"]
mover = subprocess.Popen(lives, pass_fds=[lifeline.write_fd])
stranger = subprocess.Popen(lives)
pids = f"{mover.pid} {stranger.pid}".encode()
socket.send_fds(engine, [pids], [lifeline.new_read_end()])
signal.pause()
"""
"""A process with two children that outlive it: one of the agent, and a stranger."""


def is_over(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


Agent: TypeAlias = tuple["subprocess.Popen[bytes]", socket.socket]


@pytest.fixture
def agent() -> Iterator[Agent]:
    """The process, and the socket at which it passes its lifeline."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", AGENT, str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        yield process, ours
        process.kill()


async def test_lifeline_ends_with_agent(agent: Agent) -> None:
    process, engine = agent
    pids, (fd,), _, _ = socket.recv_fds(engine, 100, 1)
    mover, stranger = map(int, pids.split())
    life = AgentLife(fd)
    try:
        assert not is_over(fd)
        process.kill()
        process.wait()
        assert not is_over(fd)
        os.kill(mover, signal.SIGKILL)

        assert await life.ended(WITHIN_S)
    finally:
        os.kill(stranger, signal.SIGKILL)
        life.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_agent_passes_its_lifeline_with_the_reply_to_hello(role: str) -> None:
    with started(role) as agents:
        agent, hello = agents.all[0], Hello(1, 1, "e", "b" * 32)
        async with AttachClient(agent.attach) as client:
            asked = {"op": hello.op, "body": to_body(hello)}
            welcome, (fd,) = await client.call_for_fds(asked)
            life = AgentLife(fd)
            assert (welcome["role"], is_over(fd)) == (role, False)
            agent.kill()
            assert await life.ended(WITHIN_S)
