"""Fetches of offers that a router named before the prefill engine made them.

`tests/unit/prefill` tests the table: how long a fetch waits, and what it is answered.
"""

import uuid
from typing import Any

import pytest

from kvbus.engine import Fetch
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.protocol import Outcome, Rendezvous
from tests.support.agents import AgentProcess, Agents, until
from tests.support.engines import Engine, engine, failure_of, hand_over, pair

pytestmark = pytest.mark.anyio

MAX_HANDOFFS = 8
NOTHING: dict[str, Any] = {"num_tokens": 0, "block_ids": {}, "sealed": False}


def rendezvous(agent: AgentProcess, **fields: Any) -> dict[str, Any]:
    return Rendezvous(uuid.uuid4().hex, agent.peer, **fields).to_json()


def begin(target: Engine, ticket: dict[str, Any], **more: Any) -> Fetch:
    blocks = {"full": [7]}
    return target.control.fetch(
        ticket, num_tokens=16, block_ids=blocks, **{"timeout_s": 30.0, **more}
    )


@pytest.mark.parametrize(("is_made", "host"), [(False, "127.0.0.1"), (True, "localhost")])
async def test_offer_or_fetch_may_come_first_and_name_is_used_once(
    prefill: AgentProcess, decode: AgentProcess, is_made: bool, host: str
) -> None:
    """Also when the router has another name for the agent than its tickets."""
    async with pair(prefill.attach, decode.attach) as (source, target):
        ticket = rendezvous(prefill)
        ticket["endpoint"] = ticket["endpoint"].replace("127.0.0.1", host)
        named = {"transfer_id": ticket["transfer_id"]}
        offer = await source.prefill.offer("r", **named, **NOTHING) if is_made else None
        fetch = begin(target, ticket)
        if offer is None:
            await until(lambda: prefill.metric("awaited_offers") == 1)
            offer = await source.prefill.offer("r", **named, **NOTHING)
        await offer.extend(16, {"full": [3]})
        await offer.seal()
        sent = source.views()[0, 0, "k"][3].clone()
        await fetch.ended
        assert target.views()[0, 0, "k"][7].equal(sent)
        assert await offer.ended is Outcome.COMPLETED
        with pytest.raises(RequestRefused) as refused:
            await source.prefill.offer("r", **named, **NOTHING)
        assert refused.value.code is ErrorCode.OFFER_EXISTS
        failure = await failure_of(begin(target, ticket))
        assert (failure.stage, failure.code) == ("awaiting", ErrorCode.OFFER_COMPLETED)
        await hand_over(source, target)


async def test_offer_is_awaited_only_while_engine_is_left(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with engine(decode.attach) as target:
        async with engine(prefill.attach):
            async with engine(prefill.attach):
                fetch = begin(target, rendezvous(prefill))
                await until(lambda: prefill.metric("awaited_offers") == 1)
            await until(lambda: prefill.metric("engines") == 1)
            assert prefill.metric("awaited_offers") == 1
        failure = await failure_of(fetch)
        later = await failure_of(begin(target, rendezvous(prefill)))
    assert (failure.stage, failure.code) == ("awaiting", ErrorCode.ENGINE_LOST)
    assert (later.stage, later.code) == ("awaiting", ErrorCode.ENGINE_NOT_READY)


async def test_offer_of_another_prompt_is_not_fetched(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        ticket = rendezvous(prefill, request_id="r-7")
        named = {"transfer_id": ticket["transfer_id"], "prompt_digest": "theirs"}
        offer = await source.prefill.offer("r", **named, **NOTHING)
        fetch = begin(target, ticket, prompt_digest="ours")
        failure = await failure_of(fetch)
        await offer.withdraw()
        assert (failure.stage, failure.code) == ("awaiting", ErrorCode.PROMPT_MISMATCH)
        assert decode.says("handoff.failed", fetch_id=fetch.fetch_id, request_id="r-7")


async def test_fetch_that_stops_waiting_frees_place_at_prefill_agent(
    fresh: Agents, decode: AgentProcess
) -> None:
    fresh.start(prefill := fresh.prepare("prefill", max_handoffs=MAX_HANDOFFS))
    async with pair(prefill.attach, decode.attach) as (source, target):
        for is_cancelled in (True, False):
            async with engine(decode.attach) as other:
                some = [
                    begin(other, rendezvous(prefill), timeout_s=600.0) for _ in range(MAX_HANDOFFS)
                ]
                await until(lambda: prefill.metric("awaited_offers") == MAX_HANDOFFS)
                for fetch in some if is_cancelled else ():
                    await fetch.cancel()
            await until(lambda: not prefill.metric("awaited_offers"))
        ticket = rendezvous(prefill)
        fetch = begin(target, ticket)
        await until(lambda: prefill.metric("awaited_offers") == 1)
        name = {"transfer_id": ticket["transfer_id"]}
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [3]}, **name)
        await fetch.ended
        await offer.ended
