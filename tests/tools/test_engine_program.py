"""The engine program hands over on request, and reports violations."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.agents import Agents
from tests.support.engine_program import EngineConfig, EngineProcess, Told, fetch_order
from tests.support.engines import FULL, SMALL, make_spec

pytestmark = pytest.mark.anyio

NUM_BLOCKS = {"full": 16, "small": 64}
SPECS = make_spec(groups=(FULL, SMALL)), make_spec(tp=2, groups=(FULL, SMALL))


class Heard(EngineProcess):
    """Keeps what is told of no order."""

    def __init__(self, config: EngineConfig, log: Path) -> None:
        super().__init__(config, log)
        self.told: list[Told] = []

    def on_told(self, told: Told) -> None:
        self.told.append(told)


@asynccontextmanager
async def engines(agents: Agents, memory: str = "direct") -> AsyncIterator[tuple[Heard, Heard]]:
    """A prefill and a decode engine whose agents have started."""
    roles = "prefill", "decode"
    sides = [agents.prepare(role) for role in roles]
    agents.start(*sides)
    made = []
    for role, agent, spec in zip(roles, sides, SPECS, strict=True):
        config = EngineConfig(
            role=role,
            attach=str(agent.attach),
            spec=spec,
            num_blocks=NUM_BLOCKS,
            memory=memory,
            ring_blocks=NUM_BLOCKS if memory == "ring" else {},
        )
        made.append(Heard(config, agents.folder / f"{role}.log"))
        await made[-1].start()
    for one in made:
        await one.up.wait()
    yield made[0], made[1]
    for one in made:
        await one.kill()


async def test_growing_offer_is_fetched_and_all_blocks_come_back(fresh: Agents) -> None:
    async with engines(fresh, memory="ring") as (source, target):
        offered = source.ask(1, {"do": "offer", "steps": [10, 30, 90]})
        ticket = (await offered.made)["ticket"]
        fetched = target.ask(2, fetch_order(1, SPECS[0], ticket, 90))
        ends = [(await one.ended)["outcome"] for one in (fetched, offered)]
        await fetched.freed
        held = [(await one.ask(3, {"do": "check"}).ended)["held"] for one in (source, target)]

        assert (ends, held) == (["completed", "completed"], [0, 0])
        assert source.told == target.told == []


async def test_bytes_of_another_offer_and_a_killed_engine_are_seen(fresh: Agents) -> None:
    async with engines(fresh) as (source, target):
        offered = source.ask(1, {"do": "offer", "steps": [40]})
        ticket = (await offered.made)["ticket"]
        fetched = target.ask(2, fetch_order(7, SPECS[0], ticket, 40, keep_s=0.01))
        await fetched.freed
        other = source.ask(3, {"do": "offer", "steps": [40]})
        await other.made
        source.signal(signal.SIGSTOP)
        source.ask(4, {"do": "withdraw", "offer": 3})
        await source.kill()

        assert [told["what"] for told in target.told] == ["wrong_bytes", "wrong_bytes"]
        assert (await other.ended)["outcome"] == "gone"
        assert fresh.all[0].says("engine.lost")
