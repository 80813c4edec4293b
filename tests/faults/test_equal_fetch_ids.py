"""A fetch id is its engine's own: another engine of the agent may have the same, or ask for it."""

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.protocol import CancelFetch, Outcome
from tests.agents import AgentProcess, until
from tests.engines import engine, failure_of

pytestmark = pytest.mark.anyio

BLOCKS = {"full": [3]}
NAME = "fetch-1"


async def test_of_two_engines_with_equal_fetch_ids_each_cancels_its_own(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with (
        engine(PrefillSession, prefill.attach, seed=1) as source,
        engine(DecodeSession, decode.attach, seed=2) as one,
        engine(DecodeSession, decode.attach, seed=3) as other,
    ):
        offers = [
            await source.prefill.offer(name, num_tokens=16, block_ids=BLOCKS, sealed=False)
            for name in ("r", "s")
        ]
        fetches = [
            target.decode.fetch(offer.ticket, num_tokens=16, block_ids=BLOCKS, fetch_id=NAME)
            for target, offer in zip((one, other), offers, strict=True)
        ]
        await until(lambda: decode.status()["counts"]["fetches"] == len(fetches))
        await fetches[0].cancel()
        failure = await failure_of(fetches[0])
        await offers[1].seal()
        fetched = await fetches[1].completed()
        story = "\n".join(decode.status(fetch_id=NAME)["story"])
        await offers[0].withdraw()
        outcomes = [await offer.released() for offer in offers]

    assert failure.code is ErrorCode.CANCELLED
    assert fetched.fetch_id == NAME
    assert outcomes == [Outcome.WITHDRAWN, Outcome.COMPLETED]
    assert "-> cancelled" in story
    assert "-> completed" in story
    assert decode.says("handoff.completed", fetch_id=NAME, engine_id=other.spec.engine_id)


async def test_an_engine_cannot_cancel_the_fetch_of_another(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with (
        engine(PrefillSession, prefill.attach, seed=1) as source,
        engine(DecodeSession, decode.attach, seed=2) as owner,
        engine(DecodeSession, decode.attach, seed=3) as other,
    ):
        offer = await source.prefill.offer("r", num_tokens=16, block_ids=BLOCKS, sealed=False)
        fetch = owner.decode.fetch(offer.ticket, num_tokens=16, block_ids=BLOCKS)
        await until(lambda: decode.status(fetch_id=fetch.fetch_id)["story"])
        with pytest.raises(RequestRefused) as refused:
            await other.decode.request(CancelFetch(fetch_id=fetch.fetch_id, release_offer=True))
        await offer.seal()
        await fetch.completed()
        outcome = await offer.released()

    assert refused.value.code is ErrorCode.FETCH_UNKNOWN
    assert outcome is Outcome.COMPLETED
