"""Engines whose ranks are at several agents hand KV over like any others, and ranks come and go.

That every byte arrives, whatever ranks are where, is in `test_shapes` and `test_random_shapes`.
"""

from typing import Any

import pytest

from kvbus.engine import AgentRanks, DecodeSession, MemorySession, PrefillSession
from kvbus.errors import ErrorCode, RequestRefused
from tests.agents import until
from tests.engines import failure_of, make_spec, works
from tests.memories import NHD
from tests.process.shapes import ShapedAgents, Side, hand_over, two_engines
from tests.process.spread_engines import ACCESS, spread_engine

pytestmark = pytest.mark.anyio

ELSEWHERE = "tcp://127.0.0.1:1"


async def test_an_engine_at_several_agents_claims_first_on_any_route(shapes: ShapedAgents) -> None:
    spread = Side(tp=2, places="01")
    async with two_engines(shapes, "direct", spread, spread) as engines:
        await hand_over(*engines, 71)
        await hand_over(*engines, 71)
    home = shapes.decode["direct"]
    lines = home.says("handoff.completed", engine_id=engines[1].spec.engine_id)
    assert [(line["ahead"], line["leased"]) for line in lines[-2:]] == [(False, True)] * 2


async def test_one_staged_rank_among_others_keeps_the_engine_from_direct_reads(
    shapes: ShapedAgents,
) -> None:
    prefill, decode = shapes.of("prefill"), shapes.of("packed")
    async with (
        spread_engine(PrefillSession, prefill, staged=[1], seed=1) as source,
        spread_engine(DecodeSession, [decode[1], decode[0]], staged=[0], seed=2) as target,
    ):
        assert await works(source, target)
        fetched = await hand_over(source, target, 71)

        assert fetched.path == "packed"


async def test_a_prefill_rank_that_left_fails_the_fetch_and_one_that_came_back_is_read(
    shapes: ShapedAgents,
) -> None:
    async with (
        spread_engine(PrefillSession, shapes.of("prefill"), seed=1) as source,
        spread_engine(DecodeSession, shapes.of("direct"), seed=2) as target,
    ):
        assert await works(source, target)
        block: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [3]}}
        offers = [await source.prefill.offer(name, **block) for name in ("r", "s")]

        await source.lose(1)
        gone = await failure_of(target.decode.fetch(offers[0].ticket, **block))
        nobody = await failure_of(target.decode.fetch(offers[1].ticket, **block))
        await source.bring_back(1)
        source.fill(3)
        for offer in offers:
            await offer.withdraw()
            await offer.released()

        assert gone.code in (ErrorCode.ENGINE_LOST, ErrorCode.TRANSFER_FAILED)
        assert (nobody.stage, nobody.code) == ("resolving", ErrorCode.ENGINE_UNKNOWN)
        assert shapes.siblings["prefill"].peer in nobody.message
        assert await works(source, target)


async def test_a_decode_rank_that_left_fails_the_fetch_and_one_that_came_back_is_filled(
    shapes: ShapedAgents,
) -> None:
    async with (
        spread_engine(PrefillSession, shapes.of("prefill"), seed=1) as source,
        spread_engine(DecodeSession, shapes.of("direct"), seed=2) as target,
    ):
        assert await works(source, target)
        block: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [3]}}
        offer = await source.prefill.offer("r", **block)

        await target.lose(1)
        fetch = target.decode.fetch(offer.ticket, **block)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        await target.bring_back(1)
        await offer.withdraw()
        await offer.released()

        assert failure.code is ErrorCode.ENGINE_UNKNOWN
        assert await works(source, target)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({ELSEWHERE: [1, 1]}, "rank 1 is named twice"),
        ({ELSEWHERE: [1], "tcp://127.0.0.1:2": [1]}, "rank 1 is named twice"),
        ({ELSEWHERE: [2]}, "rank 2 of 2 ranks"),
        ({ELSEWHERE: [0]}, "rank 0 is named twice, or at two agents"),
        ({ELSEWHERE: [0, 1]}, "named twice|no rank is at the engine's home"),
        ([AgentRanks(ELSEWHERE, (1,), ACCESS)] * 2, "named twice"),
    ],
)
async def test_ranks_that_cannot_be_elsewhere_are_refused_by_name(
    shapes: ShapedAgents, others: dict[str, list[int]] | list[AgentRanks], reason: str
) -> None:
    agent, spec = shapes.prefill, make_spec(tp=2)
    async with (
        MemorySession(agent.attach, spec, 0) as rank,
        PrefillSession(agent.attach, spec) as control,
    ):
        await rank.allocate(NHD, num_blocks=4)

        with pytest.raises(RequestRefused, match=reason) as refused:
            await control.register(others=others, access=ACCESS)

    assert refused.value.code is ErrorCode.GEOMETRY
    assert refused.value.detail == {"field": "others"}
    await until(lambda: not agent.status()["engines"])


async def test_a_rank_that_was_said_to_be_elsewhere_is_refused_at_home(
    shapes: ShapedAgents,
) -> None:
    agent, spec = shapes.prefill, make_spec(tp=2)
    async with (
        PrefillSession(agent.attach, spec) as control,
        MemorySession(agent.attach, spec, 1) as rank,
    ):
        await control.register(others={ELSEWHERE: [1]}, access=ACCESS)
        with pytest.raises(RequestRefused, match=f"rank 1 is at {ELSEWHERE}") as refused:
            await rank.allocate(NHD, num_blocks=4)

    assert refused.value.code is ErrorCode.GEOMETRY
    await until(lambda: not agent.status()["engines"])


@pytest.mark.parametrize("whose", ["nobody's", "another agent's"])
async def test_an_agent_without_the_ranks_is_named_when_hands_are_shaken(
    shapes: ShapedAgents, whose: str
) -> None:
    endpoint = ELSEWHERE if whose == "nobody's" else shapes.siblings["prefill"].peer
    home, spec = shapes.prefill, make_spec(tp=2)
    async with (
        PrefillSession(home.attach, spec) as control,
        MemorySession(home.attach, spec, 0) as rank,
        spread_engine(DecodeSession, [shapes.decode["direct"]]) as target,
    ):
        await rank.allocate(NHD, num_blocks=4)
        await control.register(others={endpoint: [1]}, access=ACCESS)
        offer = await control.offer("r", num_tokens=16, block_ids={"full": [3]})

        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [3]})
        failure = await failure_of(fetch)
        await offer.withdraw()

    unreachable = ErrorCode.PEER_UNREACHABLE, ErrorCode.ENGINE_UNKNOWN
    assert failure.code is unreachable[whose != "nobody's"]
    assert failure.stage == "resolving"
    assert endpoint in failure.message
