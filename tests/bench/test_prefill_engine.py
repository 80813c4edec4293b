"""The benchmark's prefill engine, at an agent: what becomes of an offer that nobody wants."""

from collections.abc import Iterator

import anyio
import pytest

from kvbus.bench.prefill_engine import SourceEngine
from kvbus.bench.shapes import SHAPES
from tests.agents import AgentProcess, Agents, agents_ended
from tests.plain_sockets import ask

pytestmark = pytest.mark.anyio

NUM_CHUNKS, CHUNK_S = 50, 0.05
WITHIN_S = 30.0


@pytest.fixture
def prefill() -> Iterator[AgentProcess]:
    """An agent for it."""
    with agents_ended(Agents) as agents:
        agent: AgentProcess = agents.prepare("prefill")
        agents.start(agent)
        yield agent
        agents.check()


async def test_a_growing_offer_that_is_withdrawn_ends_alone(prefill: AgentProcess) -> None:
    async with anyio.create_task_group() as tasks:
        engine = SourceEngine(tasks, str(prefill.attach), "e")
        await engine.open(next(iter(SHAPES)), 8)
        ticket = await engine.compute("r", 16, [0], NUM_CHUNKS, CHUNK_S)

        ask(
            prefill.peer,
            "withdraw",
            {
                "agent_boot": ticket["agent_boot"],
                "offer_id": ticket["offer_id"],
                "secret": ticket["secret"],
            },
        )
        with anyio.fail_after(WITHIN_S):
            assert len(await engine.settle()) == 1
            await engine.compute("after", 16, [0], 1, CHUNK_S * NUM_CHUNKS)
            await anyio.sleep(2 * CHUNK_S)  # the first one would have been extended

        await engine.close()
        tasks.cancel_scope.cancel()
