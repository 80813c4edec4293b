"""The two processes of an agent: what they load and map, the path they choose, and their ends."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.errors import ErrorCode
from kvbus.geometry import KvLayout
from tests.process.handoffs.shapes import ShapedAgents, Side, two_engines
from tests.support.agents import AgentProcess, Agents, agents_ended, until
from tests.support.engines import begin, failure_of, hand_over, hand_over_once
from tests.support.memories import Memory

pytestmark = pytest.mark.anyio

STAGING_BYTES = 128 << 20
MAX_ANONYMOUS_BYTES = 80_000_000 + STAGING_BYTES


@pytest.fixture(scope="module")
def shared_machine() -> Iterator[Agents]:
    with agents_ended(Agents) as agents:
        agents.start(
            agents.prepare("prefill"),
            agents.prepare("prefill", mapped=False),
            agents.prepare("decode", mapped=True),
            agents.prepare("decode", mapped=True, path="mapped"),
        )
        yield agents


@pytest.fixture
def machine(shared_machine: Agents) -> Iterator[list[AgentProcess]]:
    yield shared_machine.all
    shared_machine.check()


def between(prefill: AgentProcess, decode: AgentProcess) -> ShapedAgents:
    return ShapedAgents(prefill, {"auto": decode})


def anonymous_bytes(agent: AgentProcess) -> int:
    lines = Path(f"/proc/{agent.pid}/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(size) * 1024


async def test_kv_of_one_machine_is_mapped_without_torch(machine: list[AgentProcess]) -> None:
    prefill, _, decode, _ = machine
    sides = Side(tp=2, block_size=48), Side(block_size=32, memory=Memory(KvLayout.parse("HND")))
    async with two_engines(between(prefill, decode), "auto", *sides) as engines:
        fetched = [await hand_over(*engines, num_tokens) for num_tokens in (71, 100, 3)]
    assert [one.path for one in fetched] == ["mapped"] * 3
    assert decode.metric("data_jobs") == 0
    for agent in (prefill, decode):
        assert agent.memory_maps("libtorch") == 0
        assert anonymous_bytes(agent) < MAX_ANONYMOUS_BYTES


async def test_kv_of_unmapped_agent_is_read_with_nixl_or_fetch_fails(
    machine: list[AgentProcess],
) -> None:
    _, closed, decode, forced = machine
    async with two_engines(between(closed, decode), "auto", Side(), Side()) as engines:
        fetched = [await hand_over(*engines, 71) for _ in range(2)]
    async with two_engines(between(closed, forced), "auto", Side(), Side()) as engines:
        handoff = await begin(*engines)
        failure = await failure_of(handoff.fetch)
        await handoff.offer.withdraw()
    assert [one.path for one in fetched] == ["direct"] * 2
    assert failure.code is ErrorCode.CONFIG
    assert "forces 'mapped', but the memory of the prefill engine" in failure.message
    assert "by the prefill agent's config (mapped = false)" in failure.message


HEAVY = ("libnixl", "libucp", "libuct", "libtorch", "libcuda")


def loaded(pid: int) -> set[str]:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in HEAVY if name in maps}


async def end_data_process(agent: AgentProcess) -> None:
    agent.expected_trouble.add("data.ended")
    pid = agent.data_pid
    os.kill(pid, signal.SIGKILL)
    await until(lambda: agent.data_pid not in (0, pid))


async def test_only_data_process_loads_nixl_and_ends_without_loss(fresh: Agents) -> None:
    prefill, decode = agents = [fresh.prepare(role, mapped=False) for role in ("prefill", "decode")]
    fresh.start(*agents)
    await hand_over_once(prefill, decode)
    in_control = {name for agent in agents for name in loaded(agent.pid)}
    in_data = [loaded(agent.data_pid) for agent in agents]
    for agent in agents:
        await end_data_process(agent)
        await hand_over_once(prefill, decode)
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
