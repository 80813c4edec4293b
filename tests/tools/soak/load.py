"""The handoffs of a soak: streams between pairs of engines, of every path and many sizes.

Each side is a process of `tests.support.engine_program`, which compares every byte.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from kvbus.geometry import EngineSpec, GroupSpec
from tests.support.agents import AgentProcess
from tests.support.engine_program import EngineConfig, EngineProcess, Told, fetch_order

CANCELS = 0.03
NUM_WORKERS = 2
READERS: Mapping[str, dict[str, Any]] = {
    "mapped": {"mapped": True},
    "unmapped": {"mapped": False},
    "packed": {"path": "packed"},
}
"""The decode agents, by what is different of them."""


def cache_of(num_layers: int, num_heads: int) -> GroupSpec:
    """A cache of blocks of 16 tokens."""
    return GroupSpec("full", tuple(range(num_layers)), 16, num_heads, 128, "bfloat16")


@dataclass(frozen=True, slots=True)
class Stream:
    """Handoffs of up to ``most_blocks`` blocks, ``at_once``, by the decode agent ``reader``.

    An offer that grows is read under a lease while it is computed, and never cancelled here: its
    engine extends it on. A small one that is sealed is read ahead of its lease.
    """

    group: GroupSpec
    reader: str
    most_blocks: int
    layouts: tuple[str, str] = ("NHD", "NHD")
    at_once: int = 1
    grows: bool = False

    def config(self, number: int, role: str, agent: AgentProcess, layout: str) -> EngineConfig:
        """Of its engine of this role."""
        return EngineConfig(
            role=role,
            attach=str(agent.attach),
            spec=EngineSpec(f"{role}-{number}", f"model-{number}", 1, (self.group,)),
            num_blocks={"full": 2 * self.most_blocks * self.at_once * NUM_WORKERS},
            layout=layout,
        )


SMALL, BIG, LAYERED = cache_of(1, 8), cache_of(4, 8), cache_of(16, 2)
STREAMS = (
    Stream(SMALL, reader="mapped", most_blocks=1, at_once=32),
    Stream(SMALL, reader="unmapped", most_blocks=1, at_once=32),
    Stream(BIG, reader="mapped", most_blocks=16),
    Stream(LAYERED, reader="unmapped", most_blocks=16),
    Stream(BIG, reader="unmapped", most_blocks=16, grows=True),
    Stream(BIG, reader="packed", most_blocks=4, layouts=("NHD", "HND")),
)


class Engine(EngineProcess):
    """One side of a stream."""

    def __init__(self, config: EngineConfig, agent: AgentProcess, troubles: list[Told]) -> None:
        super().__init__(config, agent.folder / f"{config.spec.engine_id}.log")
        self.agent, self._troubles = agent, troubles

    def on_told(self, told: Told) -> None:
        self._troubles.append(told)


@dataclass(frozen=True, slots=True)
class Load:
    """All streams, their engines up; ``counts`` of how handoffs ended, and by which path."""

    pairs: list[tuple[Stream, Engine, Engine]]
    random: Random
    counts: Counter[str]
    troubles: list[Told]
    keys: "count[int]"

    async def run_for(self, seconds: float) -> None:
        """Hand off at full rate, and return when all that was begun has ended."""
        deadline = time.monotonic() + seconds
        async with asyncio.TaskGroup() as workers:
            for pair in self.pairs * NUM_WORKERS:
                workers.create_task(self._work(*pair, deadline))
        assert not self.troubles, self.troubles

    async def _work(self, stream: Stream, source: Engine, target: Engine, deadline: float) -> None:
        while time.monotonic() < deadline:
            all_at_once = [self._hand_over(stream, source, target) for _ in range(stream.at_once)]
            await asyncio.gather(*all_at_once)

    async def _hand_over(self, stream: Stream, source: Engine, target: Engine) -> None:
        """One in so many is cancelled, and its offer with it."""
        num_tokens = 16 * self.random.randint(1, stream.most_blocks)
        steps = [num_tokens // 3, 2 * num_tokens // 3, num_tokens]
        gives_up = not stream.grows and self.random.random() < CANCELS
        key, fetch_key = next(self.keys), next(self.keys)
        order = {"do": "offer", "steps": steps if stream.grows else steps[-1:]}
        offered = source.ask(key, order)
        ticket = (await offered.made)["ticket"]
        fetch = fetch_order(key, source.config.spec, ticket, num_tokens)
        fetched = target.ask(fetch_key, fetch)
        if gives_up:
            target.tell({"do": "cancel", "fetch": fetch_key, "release_offer": True})
        end = await fetched.ended
        if end["outcome"] != "completed" and not gives_up:
            told = await asyncio.to_thread(target.agent.status, fetch_id=fetch["fetch_id"])
            raise AssertionError(f"{end}, {told['history']}")
        self.counts[end.get("path") or end["code"]] += 1
        await fetched.freed
        await offered.ended


@asynccontextmanager
async def load(agents: Mapping[str, AgentProcess], seed: int) -> AsyncIterator[Load]:
    """The engines of all streams, at the agent ``prefill`` and at those of `READERS`."""
    made = Load([], Random(seed), Counter(), [], count(1))
    for number, stream in enumerate(STREAMS):
        places = {"prefill": agents["prefill"], "decode": agents[stream.reader]}
        source, target = (
            Engine(stream.config(number, role, agent, layout), agent, made.troubles)
            for (role, agent), layout in zip(places.items(), stream.layouts, strict=True)
        )
        made.pairs.append((stream, source, target))
    sides = [side for _, *both in made.pairs for side in both]
    for side in sides:
        await side.start()
    for side in sides:
        await side.up.wait()
    try:
        yield made
    finally:
        for side in sides:
            await side.kill()
