"""Parked offers between real agents: read on each path, and what outlives what.

The engine of an offer changes its blocks as soon as it is parked.
"""

import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from kvbus.engine import Outcome
from kvbus.errors import ErrorCode, FetchFailed, RequestRefused
from kvbus.geometry import KvLayout
from tests.process.handoffs.shapes import (
    DEEP,
    FEW_HEADS,
    GROUP,
    PATHS,
    STATE,
    WINDOW,
    ShapedAgents,
    Side,
    two_engines,
)
from tests.support.agents import AgentProcess, Agents, agents_ended, until, wait_until
from tests.support.engines import Engine, Handoff, begin, failure_of, hand_over, pair
from tests.support.memories import Memory

pytestmark = pytest.mark.anyio

HND = KvLayout.parse("HND")
KV_FIRST = KvLayout.parse("kv,block,token,head,dim")
SHAPES: dict[str, tuple[Side, Side, Any]] = {
    "equal": (Side(), Side(), (GROUP, WINDOW, STATE)),
    "tp2-3": (Side(tp=2), Side(tp=3), (GROUP, WINDOW, STATE)),
    "pp2 block 48-32": (Side(pp=2, block_size=48), Side(block_size=32), (DEEP,)),
    "padded": (Side(memory=Memory(padding=2)), Side(memory=Memory(HND, apart=True)), (GROUP,)),
    "K and V apart": (Side(memory=Memory(KV_FIRST)), Side(tp=2), (FEW_HEADS,)),
    "two agents": (Side(tp=4), Side(tp=2, places="01"), (FEW_HEADS,)),
}
FETCHES: list[dict[str, Any]] = [
    {"num_tokens": 71},
    {"num_tokens": 71, "first_token": 37, "zero_tail": True},
    {"num_tokens": 13, "offered": 13},
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", SHAPES)
async def test_a_parked_offer_is_read_on_each_path(
    shapes: ShapedAgents, path: str, name: str
) -> None:
    prefill, decode, groups = SHAPES[name]
    async with two_engines(shapes, path, prefill, decode, groups=groups) as engines:
        for fetch in FETCHES:
            fetched = await hand_over(*engines, **fetch, parks=True)
            assert (fetched.path, fetched.attempts) == (path, 1)
        assert (await hand_over(*engines, 40)).path == path
    await pools_empty(shapes.prefill)


@pytest.mark.parametrize("path", PATHS)
async def test_unregistered_memory_is_parked_too(shapes: ShapedAgents, path: str) -> None:
    side = Side(memory=Memory(direct=False))
    async with two_engines(shapes, path, side, Side()) as engines:
        assert (await hand_over(*engines, 71, parks=True)).path == path


async def test_part_of_a_parked_offer_is_read_with_its_windows(shapes: ShapedAgents) -> None:
    groups = GROUP, WINDOW
    async with two_engines(shapes, "direct", Side(), Side(), groups=groups) as engines:
        await hand_over(*engines, 64, offered=90, parks=True)
        await hand_over(*engines, 90, only_tails=True, parks=True)


@pytest.fixture(scope="module")
def parking() -> Any:
    """Two agents of one machine whose offers are parked on request, or for an engine in need."""
    pool = {"park_bytes": 4 << 20, "park_after_s": 3600.0, "late_read_s": 0.2}
    with agents_ended(Agents) as agents:
        agents.both(pool, {"mapped": True})
        yield agents


@pytest.fixture
async def engines(parking: Agents) -> AsyncIterator[tuple[Engine, Engine]]:
    prefill, decode = parking.all
    async with pair(prefill.attach, decode.attach) as engines:
        yield engines
    parking.check()
    await pools_empty(prefill)


async def pools_empty(prefill: AgentProcess) -> None:
    await until(lambda: not prefill.status()["pools"] and not prefill.metric("pool_bytes"))
    assert prefill.metric("pool_used_bytes") == 0
    assert prefill.metric("parked_offers") == 0


async def sealed(engines: tuple[Engine, Engine], **more: Any) -> Handoff:
    """A handoff without its fetch: `Handoff.fetch_again` begins it."""
    handoff = await begin(*engines, made={"readers": 2}, **more)
    await handoff.fetch.ended
    return handoff


async def offered(source: Engine, request: str, num_tokens: int = 40) -> Any:
    blocks = source.whole_blocks(3, num_tokens)
    return await source.prefill.offer(request, num_tokens=num_tokens, block_ids=blocks)


async def test_offers_of_an_engine_that_is_short_are_parked_until_it_is_not(
    engines: tuple[Engine, Engine],
) -> None:
    source, _ = engines
    first = await offered(source, "first")
    source.control.report_blocks(free=3, low=4)
    assert await first.ended is Outcome.PARKED
    second = await offered(source, "second")
    assert await second.ended is Outcome.PARKED
    source.control.report_blocks(free=4, low=4)
    third = await offered(source, "third")
    with anyio.move_on_after(0.5):
        await third.ended
    assert third.outcome is None
    for offer in (first, second, third):
        offer.withdraw()


async def test_an_open_offer_is_parked_after_its_seal_and_its_request_is_free(
    engines: tuple[Engine, Engine],
) -> None:
    source, target = engines
    handoff = await begin(source, target, 40, ready=16)
    handoff.fetch.cancel()
    with pytest.raises(FetchFailed):
        await handoff.fetch.ended
    await handoff.offer.park()
    await handoff.seal()
    assert await handoff.offer.ended is Outcome.PARKED
    again = await offered(source, handoff.offer.request_id)
    handoff.fetch_again()
    handoff.outcome = Outcome.PARKED
    await handoff.completed()
    again.withdraw()


async def test_parked_offer_outlives_its_engine_and_data_process(parking: Agents) -> None:
    prefill, decode = parking.all
    async with pair(prefill.attach, decode.attach) as (source, target):
        handoff = await begin(source, target, parks=True)
        await handoff.completed()
        last = await begin(source, target, made={"readers": 2}, parks=True)
        await last.completed()
        await source.control.aclose()
        assert prefill.status()["pools"]
        prefill.expected_trouble |= {"data.ended"}
        data_pid = prefill.data_pid
        prefill.peers_may_abort = True
        os.kill(data_pid, signal.SIGKILL)
        await until(lambda: prefill.data_pid not in (0, data_pid))
        last.fetch_again()
        assert (await last.fetch.ended).path == "mapped"
        assert last.has_landed()
    await pools_empty(prefill)


async def test_withdrawn_and_expired_offers_leave_the_pool(engines: tuple[Engine, Engine]) -> None:
    source, target = engines
    handoff = await begin(*engines, made={"readers": 2}, parks=True)
    await handoff.completed()
    handoff.offer.withdraw()
    handoff.fetch_again()
    assert (await failure_of(handoff.fetch)).code is ErrorCode.OFFER_WITHDRAWN
    late = await begin(source, target, made={"readers": 2, "ttl_s": 0.5}, parks=True)
    await late.completed()
    await anyio.sleep(0.6)
    late.fetch_again()
    assert (await failure_of(late.fetch)).code is ErrorCode.OFFER_EXPIRED


async def test_status_and_metrics_show_the_pool(parking: Agents) -> None:
    prefill, decode = parking.all
    before = {
        name: prefill.metric(name)
        for name in ("parked_bytes_total", "park_seconds_count", "parked_ends_total")
    }
    async with pair(prefill.attach, decode.attach) as engines:
        handoff = await begin(*engines, made={"readers": 2}, parks=True)
        await handoff.completed()
        (pool,) = prefill.status()["pools"].values()
        assert pool["engine_id"] == engines[0].spec.engine_id
        assert pool["is_attached"]
        assert 0 < pool["used_bytes"] < pool["size_bytes"] <= 4 << 20
        assert (pool["num_offers"], prefill.metric("parked_offers")) == (1, 1)
        handoff.fetch_again()
        await handoff.fetch.ended
    grown = {name: prefill.metric(name) - number for name, number in before.items()}
    assert grown["parked_bytes_total"] == pool["used_bytes"]
    assert (grown["park_seconds_count"], grown["parked_ends_total"]) == (1, 1)
    assert prefill.metric("parked_ends_total", outcome="completed") >= 1
    await pools_empty(prefill)


async def test_agent_without_a_pool_refuses_and_the_offer_goes_on(agents: Agents) -> None:
    prefill, decode, _ = agents.all
    async with pair(prefill.attach, decode.attach) as (source, target):
        handoff = await begin(source, target, made={"readers": 2})
        with pytest.raises(RequestRefused) as refused:
            await handoff.offer.park()
        assert refused.value.code is ErrorCode.CONFIG
        await handoff.fetch.ended
        handoff.fetch_again()
        await handoff.completed()


async def test_late_offers_are_parked_by_themselves() -> None:
    with agents_ended(Agents) as agents:
        prefill, decode = agents.both({"park_bytes": 1 << 20, "park_after_s": 0.1})
        async with pair(prefill.attach, decode.attach) as (source, target):
            late = await offered(source, "late")
            assert await late.ended is Outcome.PARKED
            handoff = await begin(source, target, offer=late)
            await handoff.fetch.ended
        agents.check()


def test_a_pool_that_does_not_fit_is_refused_with_what_does() -> None:
    with agents_ended(Agents) as agents:
        agent = agents.prepare("prefill", park_bytes=1 << 45)
        agent.launch()
        assert agent.exit_status() == 1
        wait_until(lambda: "'park_bytes'" in "".join(agent.process.log_text()), "the reason")
        assert "set it to" in agent.process.log_text()
