"""The way that an agent chooses by itself on one machine, and what it costs the agent in memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.errors import ErrorCode
from kvbus.geometry import KvLayout
from tests.process.handoffs.shapes import ShapedAgents, Side, two_engines
from tests.support.agents import AgentProcess, Agents, agents_ended
from tests.support.engines import begin, failure_of, hand_over
from tests.support.memories import Memory

pytestmark = pytest.mark.anyio

STAGING_BYTES = 128 << 20
MAX_ANONYMOUS_BYTES = 80_000_000 + STAGING_BYTES


@pytest.fixture(scope="module")
def shared_machine() -> Iterator[Agents]:
    """A prefill agent that lends and one that does not, a decode agent that borrows or must."""
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
    """They hold nothing after each test."""
    yield shared_machine.all
    shared_machine.check()


def between(prefill: AgentProcess, decode: AgentProcess) -> ShapedAgents:
    return ShapedAgents(prefill, {"auto": decode})


def anonymous_bytes(agent: AgentProcess) -> int:
    """What it has of memory that no file stands for, and nobody else has."""
    lines = Path(f"/proc/{agent.pid}/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(size) * 1024


async def test_same_machine_kv_is_mapped_cold_and_warm_without_torch(
    machine: list[AgentProcess],
) -> None:
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
