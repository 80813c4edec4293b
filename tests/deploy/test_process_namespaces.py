"""Agents of one machine in process namespaces of their own, as pods are: how KV is read, and said.

UCX reads another process's memory by its number, which another PID namespace does not know.
"""

import os
import shutil
from collections.abc import Callable, Iterator

import anyio
import pytest

from kvbus.doctor.children import Budget
from kvbus.doctor.finding import OK, WARNING, Finding
from kvbus.doctor.host import check_processes
from kvbus.doctor.nixl import wire_in
from kvbus.doctor.peer import PeerToCheck, check_peer
from tests.agents import AgentProcess, Agents, agents_ended
from tests.keyring import hand_over

IN_OTHER_PIDS = (str(shutil.which("unshare")), "--pid", "--fork", "--kill-child", "--mount-proc")
WITHIN_S = 30.0
TELL = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "error"}

pytestmark = [
    pytest.mark.long,
    pytest.mark.anyio,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and util-linux"
    ),
]

Pair = Callable[..., tuple[AgentProcess, AgentProcess]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Makes a prefill agent, in a PID namespace of its own or not, and a decode agent."""
    with agents_ended(Agents) as agents:

        def make(*, apart: bool, mapped: bool) -> tuple[AgentProcess, AgentProcess]:
            prefill, decode = (agents.prepare(role, env=TELL) for role in ("prefill", "decode"))
            for one in (prefill, decode):
                one.settings["mapped"] = mapped
                one.expected_trouble.add("not json")
            prefill.runner = IN_OTHER_PIDS if apart else ()
            agents.start(prefill, decode)
            return prefill, decode

        yield make
        for one in agents.all[:1]:
            one.kill()  # what runs the agent does not pass a signal on


async def said_of(agent: AgentProcess) -> Finding:
    """What the doctor here says of an agent of this machine."""

    def look() -> list[Finding]:  # it has an event loop of its own
        return list(check_peer(PeerToCheck(agent.peer)))

    findings = await anyio.to_thread.run_sync(look)
    return {one.name: one for one in findings}["peer.one_machine"]


@pytest.fixture(scope="module")
def reads_memory() -> bool:
    """Whether a process of this machine may read another's memory at all."""
    return all(one.severity is OK for one in check_processes(Budget(WITHIN_S, WITHIN_S)))


@pytest.mark.parametrize(
    ("apart", "wire", "severity"), [(False, "cma/memory", OK), (True, "tcp/lo", WARNING)]
)
async def test_ucx_reads_another_namespace_over_tcp_and_the_doctor_says_so(
    pair: Pair, reads_memory: bool, apart: bool, wire: str, severity: object
) -> None:
    if not apart and not reads_memory:
        pytest.skip("no process may read another's memory here, in whatever namespace")
    prefill, decode = pair(apart=apart, mapped=False)

    await hand_over(prefill, decode)

    assert wire_in("\n".join(decode.lines())) == wire
    assert (await said_of(prefill)).severity is severity


async def test_memory_is_mapped_across_process_namespaces_and_the_doctor_says_so(
    pair: Pair,
) -> None:
    prefill, decode = pair(apart=True, mapped=True)

    await hand_over(prefill, decode)

    assert decode.says("handoff.completed", path="mapped")
    assert (await said_of(prefill)).severity is OK
