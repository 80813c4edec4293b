"""Fetches of offers that a router has named before they are made, with real agents.

Who waits for how long, and is told what, is the table's: `tests/prefill/test_meetings.py`.
"""

import uuid
from typing import Any

import anyio
import pytest

from kvbus.engine import DecodeSession, Fetch, PrefillSession
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.protocol import Outcome, Rendezvous
from tests.agents import AgentProcess, Agents, until
from tests.engines import Engine, engine, failure_of, pair, same
from tests.expected import expected_after

pytestmark = pytest.mark.anyio

NUM_TOKENS = 70


def rendezvous(agent: AgentProcess, **fields: Any) -> dict[str, Any]:
    """What a router sends to both engines."""
    return Rendezvous(uuid.uuid4().hex, agent.peer, **fields).to_json()


def begin(target: Engine, meets: dict[str, Any], **more: Any) -> Fetch:
    """A fetch of what the router named."""
    options = {"timeout_s": 30.0, "num_tokens": NUM_TOKENS, **more}
    blocks = target.some_blocks(6, options["num_tokens"])
    return target.decode.fetch(meets, block_ids=blocks, **options)


async def arrives(
    prefill: AgentProcess,
    source: Engine,
    target: Engine,
    meets: dict[str, Any],
    *,
    fetch_first: bool,
) -> bool:
    """Hand over by a rendezvous; the prefill engine computes in chunks meanwhile."""
    theirs, ours = source.some_blocks(5, NUM_TOKENS), target.some_blocks(6, NUM_TOKENS)
    wanted = expected_after(target.snapshot(), source, theirs, target, ours, num_tokens=NUM_TOKENS)
    fetch = None
    if fetch_first:
        fetch = begin(target, meets)
        await until(lambda: prefill.metric("awaited_offers") == 1)
    offer = await source.prefill.offer(
        uuid.uuid4().hex,
        num_tokens=16,
        block_ids=theirs,
        sealed=False,
        transfer_id=meets["transfer_id"],
    )
    fetch = fetch or begin(target, meets)
    await offer.extend(NUM_TOKENS)
    await offer.seal()
    await fetch.completed()
    assert await offer.released() is Outcome.COMPLETED
    return same(target.snapshot(), wanted)


@pytest.mark.parametrize(("fetch_first", "host"), [(True, "127.0.0.1"), (False, "localhost")])
async def test_either_may_come_first_and_a_name_is_used_once(
    prefill: AgentProcess, decode: AgentProcess, fetch_first: bool, host: str
) -> None:
    """Also when the router has another name for the agent than its tickets."""
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets = rendezvous(prefill)
        meets["endpoint"] = meets["endpoint"].replace("127.0.0.1", host)
        assert await arrives(prefill, source, target, meets, fetch_first=fetch_first)

        with pytest.raises(RequestRefused) as refused:
            await source.prefill.offer(
                "again",
                num_tokens=16,
                block_ids=source.some_blocks(5, 16),
                transfer_id=meets["transfer_id"],
            )
        failure = await failure_of(begin(target, meets))

    assert refused.value.code is ErrorCode.OFFER_EXISTS
    assert (failure.stage, failure.code) == ("meeting", ErrorCode.OFFER_COMPLETED)


async def test_the_reader_asks_again_when_its_question_has_waited_long_enough(
    prefill: AgentProcess, fresh: Agents
) -> None:
    decode = fresh.prepare("decode", request_timeout_s=0.25)
    fresh.start(decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets, before = rendezvous(prefill), prefill.metric("refusals_total", code="busy")
        fetch = begin(target, meets)
        await anyio.sleep(1.0)  # of its questions each has 0.2 s
        await source.prefill.offer(
            "r",
            num_tokens=NUM_TOKENS,
            block_ids=source.some_blocks(5, NUM_TOKENS),
            transfer_id=meets["transfer_id"],
        )
        fetched = await fetch.completed()

        assert fetched.stages_s.meeting > 0.9
        assert prefill.metric("refusals_total", code="busy") == before


async def test_an_offer_that_is_never_made_ends_the_fetch_at_its_deadline(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (_, target):
        failure = await failure_of(
            begin(target, rendezvous(prefill, request_id="r-7"), timeout_s=0.5)
        )

        assert (failure.stage, failure.code) == ("meeting", ErrorCode.TIMEOUT)
        decode.says("handoff.failed", request_id="r-7", stage="meeting")


async def test_an_offer_is_waited_for_while_an_engine_is_left_and_no_longer(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    few = {"num_tokens": 16}
    async with engine(DecodeSession, decode.attach) as target:
        async with engine(PrefillSession, prefill.attach) as source:
            meets = rendezvous(prefill)
            async with engine(PrefillSession, prefill.attach):
                met = begin(target, meets, **few)
                await until(lambda: prefill.metric("awaited_offers") == 1)
            await until(lambda: prefill.metric("engines") == 1)
            await source.prefill.offer(
                "r", num_tokens=16, block_ids={"full": [2]}, transfer_id=meets["transfer_id"]
            )
            await met.completed()
            never = begin(target, rendezvous(prefill), **few)
            await until(lambda: prefill.metric("awaited_offers") == 1)
        failure = await failure_of(never)
        later = await failure_of(begin(target, rendezvous(prefill), **few))

    assert (failure.stage, failure.code) == ("meeting", ErrorCode.ENGINE_LOST)
    assert (later.stage, later.code) == ("meeting", ErrorCode.ENGINE_NOT_READY)


@pytest.mark.parametrize("is_made", [False, True], ids=["not made", "made"])
async def test_what_the_reader_gives_up_is_not_made_or_withdrawn(
    prefill: AgentProcess, decode: AgentProcess, is_made: bool
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets = rendezvous(prefill)
        made: dict[str, Any] = {"num_tokens": 0, "block_ids": {}, "sealed": False}
        if is_made:
            offer = await source.prefill.offer("r", transfer_id=meets["transfer_id"], **made)
        fetch = begin(target, meets)
        held = "leases" if is_made else "awaited_offers"
        await until(lambda: prefill.metric(held) == 1)
        await fetch.cancel(release_offer=True)
        await until(lambda: prefill.metric(held) == 0)

        assert (await failure_of(fetch)).code is ErrorCode.CANCELLED
        if is_made:
            assert await offer.released() is Outcome.WITHDRAWN
        else:
            with pytest.raises(RequestRefused) as refused:
                await source.prefill.offer("r", transfer_id=meets["transfer_id"], **made)
            assert refused.value.code is ErrorCode.CANCELLED


async def test_the_offer_must_be_of_the_prompt_that_the_reader_has(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets = rendezvous(prefill)
        offer = await source.prefill.offer(
            "r",
            num_tokens=16,
            block_ids=source.some_blocks(5, 16),
            prompt_digest="theirs",
            transfer_id=meets["transfer_id"],
        )
        failure = await failure_of(begin(target, meets, num_tokens=16, prompt_digest="ours"))
        await offer.withdraw()

        assert (failure.stage, failure.code) == ("meeting", ErrorCode.FORBIDDEN)


async def test_what_is_neither_a_ticket_nor_a_rendezvous_is_refused(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (_, target):
        meets = rendezvous(prefill) | {"endpoint": "ipc:///tmp/elsewhere"}
        failure = await failure_of(begin(target, meets))

        assert (failure.stage, failure.code) == ("requested", ErrorCode.INVALID)
        assert "rendezvous" in failure.message
