"""The two processes of an agent: what each of them loads, and what the end of one costs."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.agents import AgentProcess, Agents, until
from tests.support.keyring import hand_over

pytestmark = pytest.mark.anyio
HEAVY = ("libnixl", "libucp", "libuct", "libtorch", "libcuda")


def loaded(pid: int) -> set[str]:
    """Which of the heavy libraries a process has loaded."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in HEAVY if name in maps}


async def end_data_process(agent: AgentProcess) -> None:
    """Kill it, and return when the next one runs."""
    agent.expected_trouble.add("data.ended")
    pid = agent.data_pid
    os.kill(pid, signal.SIGKILL)
    await until(lambda: agent.data_pid not in (0, pid))


async def test_only_data_process_loads_nixl_and_ends_without_loss(
    fresh: Agents,
) -> None:
    prefill, decode = agents = [fresh.prepare(role, mapped=False) for role in ("prefill", "decode")]
    fresh.start(*agents)
    await hand_over(prefill, decode)
    in_control = {name for agent in agents for name in loaded(agent.pid)}
    in_data = [loaded(agent.data_pid) for agent in agents]

    for agent in agents:
        await end_data_process(agent)
        await hand_over(prefill, decode)

    assert in_control == set()
    assert in_data == 2 * [{"libnixl", "libucp", "libuct"}]


async def test_page_shows_both_processes_restarts_and_last_reason(fresh: Agents) -> None:
    agent = fresh.prepare("prefill")
    fresh.start(agent)
    await end_data_process(agent)

    control, data = json.loads(agent.page("/live")[1])["status"]["processes"]

    assert (control["name"], control["pid"], data["name"]) == ("control", agent.pid, "data")
    assert (data["pid"], data["num_restarts"]) == (agent.data_pid, 1)
    assert "SIGKILL" in data["last_end"]
    assert min(control["memory_bytes"], data["memory_bytes"]) > 1 << 20
    assert (agent.metric("data_restarts"), agent.metric("data_running")) == (1, 1)
    assert agent.page("/readyz") == (200, "ok\n")
