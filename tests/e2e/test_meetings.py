"""Fetches of offers that a router has named before they are made, with real agents."""

import uuid
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.protocol import Outcome, Rendezvous
from tests.agents import AgentProcess, Agents, agents_ended, until
from tests.engines import engine, expected_after, failure_of, pair, same

pytestmark = pytest.mark.anyio

NUM_TOKENS = 70


def rendezvous(agent: AgentProcess, **fields: Any) -> dict[str, Any]:
    """What a router sends to both engines."""
    return Rendezvous(uuid.uuid4().hex, agent.peer, **fields).to_json()


async def arrives(prefill, source, target, meets: dict[str, Any], *, fetch_first: bool) -> bool:
    """Hand over by a rendezvous; the prefill engine computes in chunks meanwhile."""
    theirs, ours = source.some_blocks(5, NUM_TOKENS), target.some_blocks(6, NUM_TOKENS)
    wanted = expected_after(target.snapshot(), source, theirs, target, ours, num_tokens=NUM_TOKENS)
    fetch = None

    def begin():
        return target.decode.fetch(meets, num_tokens=NUM_TOKENS, block_ids=ours, timeout_s=30)

    if fetch_first:
        fetch = begin()
        await until(lambda: prefill.metric("awaited_offers") == 1)
    offer = await source.prefill.offer(
        uuid.uuid4().hex,
        num_tokens=16,
        block_ids=theirs,
        sealed=False,
        transfer_id=meets["transfer_id"],
    )
    fetch = fetch or begin()
    await offer.extend(NUM_TOKENS)
    await offer.seal()
    await fetch.completed()
    assert await offer.released() is Outcome.COMPLETED
    return same(target.snapshot(), wanted)


@pytest.mark.parametrize("fetch_first", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_either_may_come_first(prefill, decode, fetch_first, host):
    """Also when the router has another name for the agent than its tickets."""
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets = rendezvous(prefill)
        meets["endpoint"] = meets["endpoint"].replace("127.0.0.1", host)
        assert await arrives(prefill, source, target, meets, fetch_first=fetch_first)


@pytest.fixture
def patient_decode(prefill: AgentProcess) -> Iterator[AgentProcess]:
    """One whose requests have a fifth of a second."""
    with agents_ended(Agents) as agents:
        agent = agents.prepare("decode", request_timeout_s=0.25)
        agents.start(agent)
        yield agent
        agents.check()


async def test_the_reader_asks_again_when_its_question_has_waited_long_enough(
    prefill, patient_decode
):
    async with pair(prefill.attach, patient_decode.attach) as (source, target):
        meets, before = rendezvous(prefill), prefill.metric("refusals_total", code="busy")
        theirs, ours = source.some_blocks(5, NUM_TOKENS), target.some_blocks(6, NUM_TOKENS)
        fetch = target.decode.fetch(meets, num_tokens=NUM_TOKENS, block_ids=ours, timeout_s=30)
        await anyio.sleep(1.0)  # of its questions each has 0.2 s
        await source.prefill.offer(
            "r", num_tokens=NUM_TOKENS, block_ids=theirs, transfer_id=meets["transfer_id"]
        )
        fetched = await fetch.completed()

        assert fetched.stages_s.meeting > 0.9
        assert prefill.metric("refusals_total", code="busy") == before


async def test_an_offer_that_is_never_made_ends_the_fetch_at_its_deadline(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (_, target):
        ours = target.some_blocks(6, NUM_TOKENS)
        fetch = target.decode.fetch(
            rendezvous(prefill, request_id="r-7"),
            num_tokens=NUM_TOKENS,
            block_ids=ours,
            timeout_s=0.5,
        )
        failure = await failure_of(fetch)

        assert (failure.stage, failure.code) == ("meeting", ErrorCode.TIMEOUT)
        decode.says("handoff.failed", request_id="r-7", stage="meeting")


async def test_an_offer_whose_engine_is_gone_is_not_waited_for(prefill, decode):
    async with engine(DecodeSession, decode.attach) as target:
        fetch_options = {"num_tokens": 16, "block_ids": {"full": [1]}, "timeout_s": 30}
        async with engine(PrefillSession, prefill.attach):
            fetch = target.decode.fetch(rendezvous(prefill), **fetch_options)
            await until(lambda: prefill.metric("awaited_offers") == 1)
        failure = await failure_of(fetch)
        later = await failure_of(target.decode.fetch(rendezvous(prefill), **fetch_options))

    assert (failure.stage, failure.code) == ("meeting", ErrorCode.ENGINE_LOST)
    assert (later.stage, later.code) == ("meeting", ErrorCode.ENGINE_NOT_READY)


async def test_an_offer_is_waited_for_while_an_engine_is_left(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets = rendezvous(prefill)
        async with engine(PrefillSession, prefill.attach):
            fetch = target.decode.fetch(meets, num_tokens=16, block_ids={"full": [1]})
            await until(lambda: prefill.metric("awaited_offers") == 1)
        await until(lambda: prefill.metric("engines") == 1)
        await source.prefill.offer(
            "r", num_tokens=16, block_ids={"full": [2]}, transfer_id=meets["transfer_id"]
        )

        await fetch.completed()


async def test_what_the_reader_gives_up_is_not_made(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets = rendezvous(prefill)
        fetch = target.decode.fetch(
            meets, num_tokens=NUM_TOKENS, block_ids=target.some_blocks(6, NUM_TOKENS)
        )
        await until(lambda: prefill.metric("awaited_offers") == 1)
        await fetch.cancel(release_offer=True)
        assert (await failure_of(fetch)).code is ErrorCode.CANCELLED
        await until(lambda: prefill.metric("awaited_offers") == 0)

        with pytest.raises(RequestRefused) as refused:
            await source.prefill.offer(
                "r",
                num_tokens=16,
                block_ids=source.some_blocks(5, 16),
                transfer_id=meets["transfer_id"],
            )

        assert refused.value.code is ErrorCode.CANCELLED


async def test_what_the_reader_gives_up_is_withdrawn_when_it_was_made(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets = rendezvous(prefill)
        offer = await source.prefill.offer(
            "r",
            num_tokens=0,
            block_ids={},
            sealed=False,
            transfer_id=meets["transfer_id"],
        )
        fetch = target.decode.fetch(
            meets, num_tokens=NUM_TOKENS, block_ids=target.some_blocks(6, NUM_TOKENS)
        )
        await until(lambda: prefill.metric("leases") == 1)
        await fetch.cancel(release_offer=True)

        assert await offer.released() is Outcome.WITHDRAWN


async def test_a_name_is_used_once(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets = rendezvous(prefill)
        assert await arrives(prefill, source, target, meets, fetch_first=True)

        with pytest.raises(RequestRefused) as refused:
            await source.prefill.offer(
                "again",
                num_tokens=16,
                block_ids=source.some_blocks(5, 16),
                transfer_id=meets["transfer_id"],
            )
        fetch = target.decode.fetch(
            meets, num_tokens=NUM_TOKENS, block_ids=target.some_blocks(6, NUM_TOKENS)
        )
        failure = await failure_of(fetch)

        assert refused.value.code is ErrorCode.OFFER_EXISTS
        assert (failure.stage, failure.code) == ("meeting", ErrorCode.OFFER_COMPLETED)


async def test_the_offer_must_be_of_the_prompt_that_the_reader_has(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets = rendezvous(prefill)
        offer = await source.prefill.offer(
            "r",
            num_tokens=16,
            block_ids=source.some_blocks(5, 16),
            prompt_digest="theirs",
            transfer_id=meets["transfer_id"],
        )
        fetch = target.decode.fetch(
            meets, num_tokens=16, block_ids=target.some_blocks(6, 16), prompt_digest="ours"
        )
        failure = await failure_of(fetch)
        await offer.withdraw()

        assert (failure.stage, failure.code) == ("meeting", ErrorCode.FORBIDDEN)


async def test_what_is_neither_a_ticket_nor_a_rendezvous_is_refused(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (_, target):
        meets = rendezvous(prefill) | {"endpoint": "ipc:///tmp/elsewhere"}
        fetch = target.decode.fetch(meets, num_tokens=16, block_ids=target.some_blocks(6, 16))
        failure = await failure_of(fetch)

        assert (failure.stage, failure.code) == ("requested", ErrorCode.INVALID)
        assert "rendezvous" in failure.message
