"""Agents on one machine and their engines' memory: copied by default, whatever the two are like."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from kvbus.errors import ErrorCode
from kvbus.geometry import KvLayout
from tests.agents import AgentProcess, Agents, agents_ended
from tests.e2e.shapes import GROUP, ShapedAgents, Side, hand_over, two_engines
from tests.engines import Engine, failure_of
from tests.memories import Memory

pytestmark = pytest.mark.anyio

HND = Memory(KvLayout.parse("HND"))
SIDES = {
    "alike": (Side(), Side()),
    "tp1-2": (Side(), Side(tp=2)),
    "tp2-1, HND": (Side(tp=2), Side(memory=HND)),
    "block sizes": (Side(block_size=48), Side(block_size=32)),
    "unregistered": (Side(memory=Memory(direct=False)), Side(tp=2, memory=Memory(direct=False))),
}


@pytest.fixture(scope="module")
def site() -> Iterator[Agents]:
    """A prefill agent that lends and one that does not; a decode agent that borrows."""
    with agents_ended(Agents) as agents:
        agents.start(
            agents.prepare("prefill"),
            agents.prepare("prefill", mapped=False),
            agents.prepare("decode", mapped=True),
            agents.prepare("decode", mapped=True, path="mapped"),
        )
        yield agents


@pytest.fixture
def agents(site: Agents) -> Iterator[Agents]:
    """They hold nothing after each test."""
    yield site
    site.check()


@asynccontextmanager
async def engines_at(
    prefill: AgentProcess, decode: AgentProcess, name: str = "alike"
) -> AsyncIterator[tuple[Engine, Engine]]:
    shaped = ShapedAgents(prefill, {"auto": decode})
    async with two_engines(shaped, "auto", *SIDES[name], groups=[GROUP]) as pair:
        yield pair


@pytest.mark.parametrize("name", SIDES)
async def test_kv_of_one_machine_is_copied_on_cold_and_on_warm_routes_and_without_torch(
    agents, name
):
    prefill, _, decode, _ = agents.all
    async with engines_at(prefill, decode, name) as pair:
        fetched = [await hand_over(*pair, num_tokens) for num_tokens in (71, 100, 3)]

    assert [one.path for one in fetched] == ["mapped"] * 3
    if name != "unregistered":  # such an engine has it imported when it attaches, for its slots
        assert decode.memory_maps("libtorch") == 0
    assert decode.metric("outstanding_handles") == 0


async def test_the_tail_of_a_block_is_zeroed_after_the_copy(agents):
    prefill, _, _, decode = agents.all
    async with engines_at(prefill, decode, "tp1-2") as pair:
        fetched = await hand_over(*pair, 71, first_token=9, zero_tail=True)

    assert fetched.path == "mapped"


async def test_kv_of_an_agent_that_does_not_lend_is_read_with_nixl(agents):
    _, closed, decode, _ = agents.all
    async with engines_at(closed, decode) as pair:
        fetched = [await hand_over(*pair, 71) for _ in range(2)]

    assert [one.path for one in fetched] == ["direct"] * 2


async def test_a_decode_agent_that_must_copy_says_why_it_cannot(agents):
    _, closed, _, forced = agents.all
    async with engines_at(closed, forced) as (source, target):
        blocks = source.some_blocks(5, 20), target.some_blocks(6, 20)
        offer = await source.prefill.offer("r", num_tokens=20, block_ids=blocks[0])
        fetch = target.decode.fetch(offer.ticket, num_tokens=20, block_ids=blocks[1])
        failure = await failure_of(fetch)
        await offer.withdraw()

    assert failure.code is ErrorCode.CONFIG
    assert "'path'" in failure.message
    assert "forces 'mapped', but the memory of the prefill engine" in failure.message
    assert "by the prefill agent's config (mapped = false)" in failure.message
