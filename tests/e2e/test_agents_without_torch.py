"""An agent imports torch, and touches its slots, only for KV that passes through them."""

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from tests.agents import AgentProcess, Agents, agents_ended, until, wait_until
from tests.engines import Engine, engine, story_of, works
from tests.memories import Memory

pytestmark = pytest.mark.anyio

MAX_ANONYMOUS_BYTES = 80_000_000
UNREGISTERED = Memory(direct=False)


@pytest.fixture(scope="module")
def measured() -> Iterator[Agents]:
    """A prefill agent, a decode agent with default rates, and one that measures."""
    with agents_ended(Agents) as agents:
        agents.start(
            agents.prepare("prefill"),
            agents.prepare("decode"),
            agents.prepare("decode", calibrate=True),
        )
        yield agents


def test_an_agent_that_measured_its_reads_is_as_small_as_any(measured):
    decode = measured.all[2]

    wait_until(lambda: rates_of(decode, "reads"), "reads are measured")

    assert imported_torch(decode) is False
    assert anonymous_bytes(decode) < MAX_ANONYMOUS_BYTES


@asynccontextmanager
async def two_engines(
    agents: list[AgentProcess], memory: Memory
) -> AsyncIterator[tuple[Engine, Engine]]:
    """Engines of equal shape."""
    prefill, decode = agents
    async with (
        engine(PrefillSession, prefill.attach, memory=memory, seed=1) as source,
        engine(DecodeSession, decode.attach, memory=memory, seed=2) as target,
    ):
        yield source, target


async def test_agents_stay_without_torch_through_a_direct_handoff(measured):
    agents = measured.all[:2]
    before = [imported_torch(agent) for agent in agents]
    anonymous = [anonymous_bytes(agent) for agent in agents]
    async with two_engines(agents, Memory()) as pair:
        assert await works(*pair)
        after = [imported_torch(agent) for agent in agents]
        anonymous += [anonymous_bytes(agent) for agent in agents]

    assert before == after == [False, False]
    assert max(anonymous) < MAX_ANONYMOUS_BYTES


async def test_torch_is_there_before_the_lease_of_the_first_fetch_that_needs_it(measured):
    decode = measured.all[1]
    async with two_engines(measured.all[:2], Memory()) as (source, target):
        assert await works(source, target)
        assert imported_torch(decode) is False
        untailed = await fetched(source, target, zero_tail=False)
        first = await fetched(source, target, zero_tail=True)
        later = await fetched(source, target, zero_tail=True)

    assert [claims_at_once(story) for story in (untailed, first, later)] == [True, False, True]


async def fetched(source: Engine, target: Engine, *, zero_tail: bool) -> list[str]:
    """The story of a fetch that completed."""
    theirs, ours = source.some_blocks(3, 40), target.some_blocks(4, 40)
    offer = await source.prefill.offer(uuid.uuid4().hex, num_tokens=40, block_ids=theirs)
    fetch = target.decode.fetch(offer.ticket, num_tokens=40, block_ids=ours, zero_tail=zero_tail)
    await fetch.completed()
    await offer.released()
    return await anyio.to_thread.run_sync(story_of, target, fetch)


def claims_at_once(story: list[str]) -> bool:
    return not any("PeerReady" in line for line in story)


async def test_torch_is_there_before_the_first_fetch_of_an_engine_that_needs_it(measured):
    agents = [measured.all[0], measured.all[2]]
    before = [imported_torch(agent) for agent in agents]
    async with two_engines(agents, UNREGISTERED):
        await until(lambda: all(imported_torch(agent) for agent in agents))

    assert before == [False, False]


async def test_what_passes_through_slots_brings_torch_and_then_the_rates_of_copies(measured):
    agents = [measured.all[0], measured.all[2]]
    async with two_engines(agents, UNREGISTERED) as pair:
        assert await works(*pair)
        assert await works(*pair)

        assert [imported_torch(agent) for agent in agents] == [True, True]
    wait_until(lambda: rates_of(agents[1], "copies"), "copies are measured")


def rates_of(decode: AgentProcess, part: str) -> list[Any]:
    events = ("rates.measured", "rates.defaulted")
    return [line for event in events for line in decode.logged(event, part=part)]


def imported_torch(agent: AgentProcess) -> bool:
    return agent.memory_maps("libtorch") > 0


def anonymous_bytes(agent: AgentProcess) -> int:
    """What it has of memory that no file stands for, and nobody else has."""
    lines = Path(f"/proc/{agent.pid}/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(size) * 1024
