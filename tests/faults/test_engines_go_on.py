"""Engines whose agents are killed again and again go on, without a restart of their own."""

import anyio
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from tests.agents import until
from tests.faults.conftest import Started
from tests.faults.kept_engines import BLOCKS_EACH, Handoffs, kept_engine

pytestmark = pytest.mark.anyio

NUM_HANDOFFS, NUM_ROUNDS = 3, 2
MORE = 10
WITHIN_S = 60.0


@pytest.mark.timeout(300)
async def test_handoffs_go_on_after_each_death_of_both_agents(fresh: Started) -> None:
    agents = {"prefill": fresh.prefill(), "decode": fresh.decode(mapped=True)}
    fresh.start(*agents.values())
    shape = {"num_blocks": NUM_HANDOFFS * BLOCKS_EACH}
    async with (
        kept_engine(PrefillSession, agents["prefill"].attach, **shape) as source,
        kept_engine(DecodeSession, agents["decode"].attach, **shape) as target,
        anyio.create_task_group() as tasks,
    ):
        handoffs = [Handoffs(source, target, number) for number in range(NUM_HANDOFFS)]
        for one in handoffs:
            tasks.start_soon(one.run)

        async def each_goes_on() -> None:
            wanted = [one.num_completed + MORE for one in handoffs]
            await until(
                lambda: all(
                    one.num_completed >= count for one, count in zip(handoffs, wanted, strict=True)
                ),
                WITHIN_S,
            )

        for _ in range(NUM_ROUNDS):
            await each_goes_on()
            for agent in agents.values():
                agent.kill()
            for agent in agents.values():
                agent.launch()
            for agent in agents.values():
                await anyio.to_thread.run_sync(agent.wait_started)
        await each_goes_on()
        for one in handoffs:
            one.is_over = True

    opened = {"prefill": source.control.num_opened, "decode": target.control.num_opened}
    assert [one.trouble for one in handoffs] == [[]] * NUM_HANDOFFS
    assert {times for one in handoffs for times in one.ends.values()} == {1}
    assert sum(one.failures.total() for one in handoffs) > 0
    assert opened == dict.fromkeys(agents, 1 + NUM_ROUNDS)
