"""Engines at several agents, and ranks that leave and return; see `test_shapes`."""

from typing import Any

import pytest

from kvbus.engine import AgentRanks, Link
from kvbus.errors import ErrorCode, RequestRefused
from tests.process.handoffs.shapes import ShapedAgents
from tests.support.agents import until
from tests.support.engines import (
    RANK_SECRET,
    failure_of,
    hand_over,
    make_spec,
    rank_link,
    spread_engine,
    works,
)

pytestmark = pytest.mark.anyio

ELSEWHERE = "tcp://127.0.0.1:1"
BLOCK: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [3]}}


async def test_one_staged_rank_keeps_engine_from_direct_reads(shapes: ShapedAgents) -> None:
    home, other = shapes.of("packed")
    async with (
        spread_engine(shapes.of("prefill"), staged=[1], seed=1) as source,
        spread_engine([other, home], staged=[0], seed=2) as target,
    ):
        assert (await hand_over(source, target, 71)).path == "packed"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_lost_rank_fails_fetch_and_returned_rank_works_again(
    shapes: ShapedAgents, role: str
) -> None:
    async with (
        spread_engine(shapes.of("prefill"), seed=1) as source,
        spread_engine(shapes.of("direct"), seed=2) as target,
    ):
        loser = source if role == "prefill" else target
        assert await works(source, target)
        offers = [await source.prefill.offer(name, **BLOCK) for name in ("r", "s")]
        await loser.lose(1)
        failures = []
        for offer in offers:
            fetch = target.decode.fetch(offer.ticket, **BLOCK)
            failures.append(await failure_of(fetch))
            await fetch.freed
        await loser.bring_back(1)
        source.fill(3)
        for offer in offers:
            await offer.withdraw()
            await offer.ended
        assert await works(source, target)
    if role == "prefill":
        assert failures[0].code in (ErrorCode.ENGINE_LOST, ErrorCode.TRANSFER_FAILED)
        assert failures[1].stage == "resolving"
        assert shapes.siblings["prefill"].peer in failures[1].message
    else:
        assert failures[0].code is ErrorCode.ENGINE_UNKNOWN
    assert failures[1].code is ErrorCode.ENGINE_UNKNOWN


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({ELSEWHERE: [1], "tcp://127.0.0.1:2": [1]}, "rank 1 is named twice"),
        ({ELSEWHERE: [2]}, "rank 2 of 2 ranks"),
        ({ELSEWHERE: [0]}, "rank 0 is named twice, or at two agents"),
        ({ELSEWHERE: [0, 1]}, "named twice|no rank is at the engine's home"),
    ],
)
async def test_ranks_that_cannot_be_elsewhere_are_refused_by_name(
    shapes: ShapedAgents, named: dict[str, list[int]], reason: str
) -> None:
    agent, spec = shapes.prefill, make_spec(tp=2)
    others = [AgentRanks(at, tuple(ranks), RANK_SECRET) for at, ranks in named.items()]
    rank, _ = rank_link(agent.attach, spec, 0, num_blocks=4)
    async with rank:
        with pytest.raises(RequestRefused, match=reason) as refused:
            await Link(
                agent.attach, spec, remote_ranks=others, rank_secret=RANK_SECRET
            ).__aenter__()
    assert refused.value.code is ErrorCode.GEOMETRY
    assert refused.value.detail == {"field": "remote_ranks"}
    await until(lambda: not agent.status()["engines"])


@pytest.mark.parametrize("whose", ["nobody's", "another agent's"])
async def test_handshake_names_agent_that_lacks_ranks(shapes: ShapedAgents, whose: str) -> None:
    endpoint = ELSEWHERE if whose == "nobody's" else shapes.siblings["prefill"].peer
    home, spec = shapes.prefill, make_spec(tp=2)
    rank, elsewhere = (rank_link(home.attach, spec, number, num_blocks=4)[0] for number in range(2))
    async with (
        rank,
        Link(
            home.attach,
            spec,
            remote_ranks=[AgentRanks(endpoint, (1,), RANK_SECRET)],
            rank_secret=RANK_SECRET,
        ) as control,
        spread_engine([shapes.decode["direct"]]) as target,
    ):
        with pytest.raises(RequestRefused, match=f"listed rank 1 at {endpoint}") as refused:
            await elsewhere.__aenter__()
        offer = await control.offer("r", **BLOCK)
        failure = await failure_of(target.decode.fetch(offer.ticket, timeout_s=5.0, **BLOCK))
        await offer.withdraw()
    unreachable = ErrorCode.PEER_UNREACHABLE, ErrorCode.ENGINE_UNKNOWN
    assert refused.value.code is ErrorCode.GEOMETRY
    assert failure.code is unreachable[whose != "nobody's"]
    assert failure.stage == "resolving"
    assert endpoint in failure.message
