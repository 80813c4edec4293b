"""An agent imports torch, and touches its slots, only for KV that passes through them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from tests.agents import AgentProcess, Agents, agents_ended
from tests.engines import Engine, engine, works
from tests.memories import Memory

pytestmark = pytest.mark.anyio

MAX_ANONYMOUS_BYTES = 80_000_000
UNREGISTERED = Memory(direct=False)


@pytest.fixture(scope="module")
def measured() -> Iterator[Agents]:
    """A prefill agent, and a decode agent that measures, as both do outside of tests."""
    with agents_ended(Agents) as agents:
        agents.start(agents.prepare("prefill"), agents.prepare("decode", calibrate=True))
        agents.all[1].says("rates.measured", part="reads")
        yield agents


@asynccontextmanager
async def two_engines(agents: Agents, memory: Memory) -> AsyncIterator[tuple[Engine, Engine]]:
    """Engines of equal shape."""
    prefill, decode = agents.all
    async with (
        engine(PrefillSession, prefill.attach, memory=memory, seed=1) as source,
        engine(DecodeSession, decode.attach, memory=memory, seed=2) as target,
    ):
        yield source, target


async def test_agents_stay_without_torch_through_a_direct_handoff(measured):
    before = [imported_torch(agent) for agent in measured.all]
    anonymous = [anonymous_bytes(agent) for agent in measured.all]
    async with two_engines(measured, Memory()) as pair:
        assert await works(*pair)
        after = [imported_torch(agent) for agent in measured.all]
        anonymous += [anonymous_bytes(agent) for agent in measured.all]

    assert before == after == [False, False]
    assert max(anonymous) < MAX_ANONYMOUS_BYTES


async def test_what_passes_through_slots_brings_torch_and_then_the_rates_of_copies(measured):
    async with two_engines(measured, UNREGISTERED) as pair:
        assert await works(*pair)
        assert await works(*pair)

        assert [imported_torch(agent) for agent in measured.all] == [True, True]
    assert measured.all[1].says("rates.measured", part="copies")


def imported_torch(agent: AgentProcess) -> bool:
    return agent.memory_maps("libtorch") > 0


def anonymous_bytes(agent: AgentProcess) -> int:
    """What it has of memory that no file stands for, and nobody else has."""
    lines = Path(f"/proc/{agent.pid}/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(size) * 1024
