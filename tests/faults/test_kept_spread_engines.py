"""Engines at several agents, their sessions kept: each agent can start again, none is replaced.

Each engine has rank 0 at its home, and rank 1 at another agent.
"""

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import pytest

from kvbus.engine import DecodeSession, KeptSession, MemorySession, PrefillSession
from kvbus.errors import FetchFailed
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, until
from tests.engines import NUM_BLOCKS, Engine, make_spec, same
from tests.expected import expected_after
from tests.faults.conftest import Started
from tests.memories import NHD
from tests.process.spread_engines import ACCESS, ranks_elsewhere

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

NUM_TOKENS = 40
GOES_ON_WITHIN_S = 60.0
HOME, OTHER = 0, 1


@dataclass
class Spread:
    """An engine, and its kept sessions: the control session's, and one for each rank."""

    engine: Engine
    control: KeptSession[Any]
    ranks: list[KeptSession[MemorySession]]

    async def latest(self) -> Engine:
        """The engine with the control session that can be used."""
        self.engine.control = await self.control.opened()
        return self.engine


@asynccontextmanager
async def kept_spread(
    kind: type[PrefillSession] | type[DecodeSession], agents: list[AgentProcess], seed: int
) -> AsyncIterator[Spread]:
    """A registered engine of two ranks."""
    spec = make_spec(tp=2)
    async with AsyncExitStack() as stack:
        storages, ranks, caches = stack.enter_context(ExitStack()), [], []
        for rank, agent in enumerate(agents):
            make = partial(MemorySession, storages=storages, access=ACCESS)
            kept = KeptSession(partial(make, agent.attach, spec, rank), name=f"rank {rank}")
            ranks.append(await stack.enter_async_context(kept))
            caches.append(await (await kept.opened()).allocate(NHD, num_blocks=NUM_BLOCKS))

        async def begin(session: Any) -> None:
            await session.register(others=ranks_elsewhere(agents))
            await session.ready()

        opening = partial(kind, agents[HOME].attach, spec)
        control: KeptSession[Any] = KeptSession(opening, begin=begin, name="control")
        await stack.enter_async_context(control)
        with anyio.fail_after(GOES_ON_WITHIN_S):
            engine = Engine(spec, await control.opened(), caches, NUM_BLOCKS)
        engine.fill(seed)
        yield Spread(engine, control, ranks)


@dataclass
class Sites:
    """Two agents a side, and an engine over both."""

    agents: dict[str, list[AgentProcess]]
    engines: dict[str, Spread]

    async def hand_over(self) -> bool:
        """Whether one handoff completes; the bits are right if it does."""
        source, target = [await self.engines[role].latest() for role in ("prefill", "decode")]
        theirs, ours = source.some_blocks(3, NUM_TOKENS), target.some_blocks(4, NUM_TOKENS)
        blocks = source, theirs, target, ours
        wanted = expected_after(target.snapshot(), *blocks, num_tokens=NUM_TOKENS)
        offer = await source.prefill.offer(
            uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids=theirs
        )
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours, timeout_s=10.0
        )
        try:
            await fetch.completed()
        except FetchFailed:
            await fetch.blocks_freed()
            await offer.withdraw()
            return False
        assert same(target.snapshot(), wanted)
        return await offer.released() is Outcome.COMPLETED

    async def goes_on(self) -> bool:
        """Whether a handoff completes soon: the first may find out what has become of an agent."""
        deadline = time.monotonic() + GOES_ON_WITHIN_S
        while time.monotonic() < deadline:
            if await self.hand_over():
                return True
        return False


@pytest.fixture
async def sites(fresh: Started) -> AsyncIterator[Sites]:
    """Both engines, at agents of their own."""
    prefill, decode = [fresh.prefill() for _ in range(2)], [fresh.decode() for _ in range(2)]
    fresh.start(*prefill, *decode)
    async with (
        kept_spread(PrefillSession, prefill, seed=1) as source,
        kept_spread(DecodeSession, decode, seed=2) as target,
    ):
        yield Sites({"prefill": prefill, "decode": decode}, {"prefill": source, "decode": target})


@pytest.mark.parametrize(
    ("role", "which"),
    [
        pytest.param("prefill", OTHER, id="prefill other"),
        pytest.param("decode", HOME, id="decode home"),
    ],
)
async def test_an_engine_goes_on_with_an_agent_that_was_killed_and_is_back(
    sites: Sites, role: str, which: int
) -> None:
    assert await sites.hand_over()
    killed, spread = sites.agents[role][which], sites.engines[role]
    kept = spread.ranks[1 - which]

    killed.kill()
    killed.start()
    await until(lambda: spread.ranks[which].num_opened == 2)

    assert await sites.goes_on()
    assert kept.num_opened == 1, "the memory at the other agent stays registered"
    assert spread.control.num_opened == (2 if which == HOME else 1)


@pytest.fixture
def said_by_successors(fresh: Started) -> Any:
    """What the successor of an agent says that is told no."""

    async def said(agent: AgentProcess) -> str:
        successor = fresh.successor(agent)
        successor.expected_trouble = {"not json"}
        successor.launch()
        assert await anyio.to_thread.run_sync(successor.exit_status) == 1
        return "\n".join(line for line in successor.lines() if line.startswith("error: "))

    return said


@pytest.mark.parametrize(
    "which", [HOME, pytest.param(OTHER, marks=pytest.mark.long)], ids=["home", "other"]
)
async def test_an_agent_of_such_an_engine_is_not_replaced_and_the_reason_says_what_to_do(
    sites: Sites, said_by_successors: Any, which: int
) -> None:
    agent, name = sites.agents["prefill"][which], sites.engines["prefill"].engine.spec.engine_id

    said = await said_by_successors(agent)

    assert f"'{name}' stays: some of its ranks are at other agents" in said
    assert "start it without --replace" in said
    assert not agent.logged("agent.replacing")
    assert await sites.hand_over()
