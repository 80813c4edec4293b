"""``kvbus trace`` shows what agents with other ranks of an engine did for a request."""

from collections.abc import Iterator

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from tests.agents import Agents, agents_ended
from tests.e2e.spread_engines import spread_engine
from tests.e2e.test_trace import names, told

pytestmark = pytest.mark.anyio

RING = {"staging_bytes": 8 * 65536, "slot_bytes": 65536}


@pytest.fixture
def spread() -> Iterator[Agents]:
    """Two prefill agents, and two decode agents that have all of it packed."""
    with agents_ended(Agents) as agents:
        more = {"prefill": RING, "decode": {**RING, "path": "packed"}}
        agents.start(*(agents.prepare(role, **more[role]) for role in more for _ in range(2)))
        yield agents
        agents.check()


async def test_agents_with_other_ranks_tell_their_part_by_the_ids_that_the_others_know(spread):
    async with (
        spread_engine(PrefillSession, spread.all[:2], seed=1) as source,
        spread_engine(DecodeSession, spread.all[2:], seed=2) as target,
    ):
        blocks = source.some_blocks(1, 64), target.some_blocks(2, 64)
        offer = await source.prefill.offer("spread", num_tokens=64, block_ids=blocks[0])
        fetch = target.decode.fetch(offer.ticket, num_tokens=64, block_ids=blocks[1])
        await fetch.completed()
        await offer.released()

    peers = [part for agent in spread.all for part in ("--peer", agent.peer)]
    answer = await told("spread", *peers)

    home, other = (names(answer[agent.settings["agent_id"]]) for agent in spread.all[:2])
    assert home[0] == "offer"
    assert {*other} >= {"gathering", "packed"}
    home, other = (names(answer[agent.settings["agent_id"]]) for agent in spread.all[2:])
    assert home[0] == "fetch"
    assert "delegated" in home
    assert {*other} >= {"packing", "READ", "scattering"}
