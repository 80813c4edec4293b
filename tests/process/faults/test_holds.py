"""Offers of queued requests while agents restart."""

import pytest

from kvbus.engine import Outcome
from tests.process.faults.conftest import Started
from tests.process.faults.test_restarts import WITHIN_S, kill_and_start
from tests.support.agents import until
from tests.support.engines import ONE_BLOCK, pair

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NUM_HELD = 3


async def test_holds_continue_when_both_agents_restart(fresh: Started) -> None:
    """The next prefill agent gets the offers from their engine, the next decode agent the holds."""
    prefill, decode = fresh.both()
    async with pair(prefill.attach, decode.attach, agent_wait_s=WITHIN_S) as (source, target):
        offers = [source.control.offer(f"r{one}", **ONE_BLOCK) for one in range(NUM_HELD)]
        for offer in offers:
            await offer
            target.control.hold(offer.ticket)
        for agent in (prefill, decode):
            await until(lambda: prefill.metric("held_offers") == NUM_HELD, WITHIN_S)
            await kill_and_start(agent)
        await until(lambda: decode.metric("holds") == NUM_HELD, WITHIN_S)
        await until(lambda: prefill.metric("held_offers") == NUM_HELD, WITHIN_S)
        for offer in offers:
            target.control.release(offer.ticket)
            assert await offer.ended is Outcome.COMPLETED
        assert decode.metric("holds") == 0
