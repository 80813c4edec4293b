"""Engines hand over while their agents are killed, or started again, and need no restart.

With ``KVBUS_RESTARTS=20`` each agent is started again as often.
"""

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import anyio
import pytest

from kvbus.engine import Link
from kvbus.errors import PeerLost
from tests.agents import AgentProcess, until
from tests.engine_program import Asked, EngineConfig, EngineProcess, Told, fetch_order
from tests.engines import FULL, NUM_BLOCKS, make_spec, rank_link
from tests.faults.conftest import Started

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1800)]

NUM_RESTARTS = int(os.environ.get("KVBUS_RESTARTS", "2"))
NUM_DEATHS, NUM_WORKERS = 2, 4
MORE, WITHIN_S = 10, 60.0
WAIT_S = 0.3
PAUSE_S = 0.1
"""Between two handoffs: more of them are too many for a busy machine."""
NUM_TOKENS = 4 * FULL.block_size


class Side(EngineProcess):
    """An engine at an agent; it compares every byte, and what must not happen is in ``told``."""

    def __init__(self, role: str, agent: AgentProcess, folder: Path) -> None:
        config = EngineConfig(
            role=role,
            attach=str(agent.attach),
            spec=make_spec(),
            num_blocks={FULL.name: NUM_BLOCKS},
        )
        super().__init__(config, folder / f"{role}.log")
        self.told: list[Told] = []

    def on_told(self, told: Told) -> None:
        self.told.append(told)


@dataclass
class Traffic:
    """Handoffs of several workers, until `is_over`; ``ends`` counts how they ended."""

    source: Side
    target: Side
    is_over: bool = False
    ends: Counter[str] = field(default_factory=Counter)
    keys: "count[int]" = field(default_factory=count)

    async def work(self) -> None:
        while not self.is_over:
            for side in (self.source, self.target):
                await side.up.wait()
            self.ends[await self._hand_over()] += 1
            await anyio.sleep(PAUSE_S)

    async def held(self) -> tuple[int, Asked]:
        """An offer that nobody fetches, and its number."""
        key = next(self.keys)
        offer = self.source.ask(key, {"do": "offer", "steps": [NUM_TOKENS]})
        assert "ticket" in await offer.made
        return key, offer

    async def _hand_over(self) -> str:
        key, fetch_key = next(self.keys), next(self.keys)
        offered = self.source.ask(key, {"do": "offer", "steps": [NUM_TOKENS]})
        made = await offered.made
        if "ticket" not in made:
            return f"no offer: {made['code']}"
        order = fetch_order(key, self.source.config.spec, made["ticket"], NUM_TOKENS)
        fetched = self.target.ask(fetch_key, order)
        end = await fetched.ended
        await fetched.freed
        if end["outcome"] != "completed":
            self.source.tell({"do": "withdraw", "offer": key})
        over = await offered.ended
        return f"{end['outcome']} {end.get('code', '')} of {over['outcome']}"

    async def goes_on(self) -> None:
        """Some more handoffs complete."""
        wanted = self.num_completed + MORE
        await until(lambda: self.num_completed >= wanted, WITHIN_S)

    @property
    def num_completed(self) -> int:
        return self.ends["completed  of completed"]


@asynccontextmanager
async def traffic(prefill: AgentProcess, decode: AgentProcess) -> AsyncIterator[Traffic]:
    """Handoffs between engines of two agents, within the ``with``."""
    folder = prefill.folder.parent
    made = Traffic(Side("prefill", prefill, folder), Side("decode", decode, folder))
    sides = made.source, made.target
    for side in sides:
        await side.start()
    async with anyio.create_task_group() as tasks:
        for _ in range(NUM_WORKERS):
            tasks.start_soon(made.work)
        yield made
        made.is_over = True
    for side in sides:
        await side.ask(-1, {"do": "check"}).ended
        await side.kill()
    assert [side.told for side in sides] == [[], []]


async def test_handoffs_go_on_after_each_death_of_both_agents(fresh: Started) -> None:
    both = fresh.both(decode={"mapped": True})
    lost: list[str] = []
    async with traffic(*both) as handoffs:
        for _ in range(NUM_DEATHS):
            await handoffs.goes_on()
            _, offer = await handoffs.held()
            for agent in both:
                agent.kill()
            lost.append((await offer.ended)["outcome"])
            for agent in both:
                agent.launch()
            for agent in both:
                await anyio.to_thread.run_sync(agent.wait_started)
        await handoffs.goes_on()

    assert lost == ["lost"] * NUM_DEATHS


async def test_no_handoff_fails_while_either_agent_is_started_again(fresh: Started) -> None:
    """An agent that is told to end has time to finish, and the engines wait for the next one."""
    agents = fresh.both(decode={"mapped": True})
    async with traffic(*agents) as handoffs:
        for _ in range(NUM_RESTARTS):
            for agent in agents:
                await handoffs.goes_on()
                agent.signal(signal.SIGTERM)
                assert await anyio.to_thread.run_sync(agent.exit_status) == 0
                agent.launch()
                await anyio.to_thread.run_sync(agent.wait_started)
        await handoffs.goes_on()

    failed = [line for agent in fresh.all for line in agent.logged("handoff.failed")]
    assert (list(handoffs.ends), failed) == (["completed  of completed"], [])


async def test_what_waits_for_the_next_agent_fails_if_none_comes_in_time(fresh: Started) -> None:
    fresh.start(prefill := fresh.prefill())
    spec = make_spec()
    rank, _ = rank_link(prefill.attach, spec, 0)
    async with rank, Link(prefill.attach, spec, agent_wait_s=WAIT_S) as link:
        prefill.signal(signal.SIGTERM)
        assert await anyio.to_thread.run_sync(prefill.exit_status) == 0
        with pytest.raises(PeerLost, match="is gone"):
            await link.offer("r", num_tokens=0, block_ids={})
