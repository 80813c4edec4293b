"""Fetches of offers that a router has named before they are made, with real agents.

Who waits for how long, is told what, and may give up is the table's:
`tests/unit/prefill/test_meetings.py`.
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
    """What a router sends to both engines."""
    return Rendezvous(uuid.uuid4().hex, agent.peer, **fields).to_json()


def begin(target: Engine, meets: dict[str, Any], **more: Any) -> Fetch:
    """A fetch of what the router named."""
    return target.control.fetch(
        meets, num_tokens=16, block_ids={"full": [7]}, **{"timeout_s": 30.0, **more}
    )


@pytest.mark.parametrize(("is_made", "host"), [(False, "127.0.0.1"), (True, "localhost")])
async def test_either_may_come_first_and_a_name_is_used_once(
    prefill: AgentProcess, decode: AgentProcess, is_made: bool, host: str
) -> None:
    """Also when the router has another name for the agent than its tickets."""
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets = rendezvous(prefill)
        meets["endpoint"] = meets["endpoint"].replace("127.0.0.1", host)
        named = {"transfer_id": meets["transfer_id"]}
        offer = await source.prefill.offer("r", **named, **NOTHING) if is_made else None
        met = begin(target, meets)
        if offer is None:
            await until(lambda: prefill.metric("awaited_offers") == 1)
            offer = await source.prefill.offer("r", **named, **NOTHING)
        await offer.extend(16, {"full": [3]})
        await offer.seal()
        sent = source.views()[0, 0, "k"][3].clone()
        await met.ended

        assert target.views()[0, 0, "k"][7].equal(sent)
        assert await offer.ended is Outcome.COMPLETED
        with pytest.raises(RequestRefused) as refused:
            await source.prefill.offer("r", **named, **NOTHING)
        assert refused.value.code is ErrorCode.OFFER_EXISTS
        failure = await failure_of(begin(target, meets))
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
            still_awaited = prefill.metric("awaited_offers")
        failure = await failure_of(fetch)
        later = await failure_of(begin(target, rendezvous(prefill)))

    assert still_awaited == 1
    assert (failure.stage, failure.code) == ("awaiting", ErrorCode.ENGINE_LOST)
    assert (later.stage, later.code) == ("awaiting", ErrorCode.ENGINE_NOT_READY)


async def test_an_offer_of_another_prompt_is_not_met(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets = rendezvous(prefill, request_id="r-7")
        named = {"transfer_id": meets["transfer_id"], "prompt_digest": "theirs"}
        offer = await source.prefill.offer("r", **named, **NOTHING)
        fetch = begin(target, meets, prompt_digest="ours")
        failure = await failure_of(fetch)
        await offer.withdraw()

        assert (failure.stage, failure.code) == ("awaiting", ErrorCode.PROMPT_MISMATCH)
        assert decode.says("handoff.failed", fetch_id=fetch.fetch_id, request_id="r-7")


@pytest.mark.parametrize("how", ["cancelled", "lost its engine"])
async def test_fetch_that_stops_waiting_frees_place_at_prefill_agent(
    fresh: Agents, how: str
) -> None:
    prefill = fresh.prepare("prefill", max_handoffs=MAX_HANDOFFS)
    fresh.start(prefill, decode := fresh.prepare("decode"))
    async with pair(prefill.attach, decode.attach) as (source, target):
        async with engine(decode.attach) as other:
            some = [begin(other, rendezvous(prefill), timeout_s=600.0) for _ in range(MAX_HANDOFFS)]
            await until(lambda: prefill.metric("awaited_offers") == MAX_HANDOFFS)
            for fetch in some if how == "cancelled" else ():
                await fetch.cancel()
        await until(lambda: not prefill.metric("awaited_offers"))

        meets = rendezvous(prefill)
        fetch = begin(target, meets)
        await until(lambda: prefill.metric("awaited_offers") == 1)
        name = {"transfer_id": meets["transfer_id"]}
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [3]}, **name)
        await fetch.ended
        await offer.ended
