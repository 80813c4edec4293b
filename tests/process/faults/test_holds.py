"""Offers of queued requests while agents restart and engines crash."""

import pytest

from kvbus.engine import Outcome
from tests.process.faults.conftest import Started
from tests.process.faults.test_restarts import WITHIN_S, kill_and_start
from tests.support.agents import until
from tests.support.engines import pair

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

TTL_S, LONGER_S = 12.0, 20.0
"""A republished offer has 10 s at least."""
NUM_TOKENS, NUM_HELD = 16, 3


async def test_holds_continue_when_both_agents_restart(fresh: Started) -> None:
    """The next prefill agent gets the offers from their engine, the next decode agent the holds."""
    prefill, decode = fresh.both()
    attach = prefill.attach, decode.attach
    async with pair(*attach, agent_wait_s=WITHIN_S) as (source, target):
        offers = [
            await source.control.offer(
                f"r{one}",
                num_tokens=NUM_TOKENS,
                block_ids=source.some_blocks(one, NUM_TOKENS),
                ttl_s=TTL_S,
            )
            for one in range(NUM_HELD + 1)
        ]
        *held, other = offers
        for offer in held:
            target.control.hold(offer.ticket)
        await until(lambda: prefill.metric("held_offers") == NUM_HELD)
        for agent in (prefill, decode):
            await kill_and_start(agent)
        await until(lambda: decode.metric("holds") == NUM_HELD, WITHIN_S)
        await until(lambda: prefill.metric("held_offers") == NUM_HELD, WITHIN_S)
        assert await other.ended is Outcome.EXPIRED
        later = await source.control.offer(
            "later",
            num_tokens=NUM_TOKENS,
            block_ids=source.some_blocks(9, NUM_TOKENS),
            ttl_s=LONGER_S,
        )
        assert await later.ended is Outcome.EXPIRED
        for offer in held:
            blocks = target.some_blocks(9, NUM_TOKENS)
            await target.control.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=blocks).ended
            assert await offer.ended is Outcome.COMPLETED
        assert decode.metric("holds") == 0
