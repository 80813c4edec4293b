"""The reply that ends an offer is lost, and its connection too: the fetch completes nonetheless."""

import time
import uuid

import pytest

from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome
from tests.agents import until
from tests.chaos.links import PROXY_HOST
from tests.engines import Engine, failure_of, pair, story_of, works
from tests.faults.losing_link import LosingLink, lossy

pytestmark = pytest.mark.anyio

NUM_LOST = 3
NUM_TOKENS = 40
TIMEOUT_S, LATE_S = 4.0, 1.0


async def hand_over(source: Engine, target: Engine, link: LosingLink, *, times_out: bool) -> None:
    """A handoff whose last reply is lost when the offer has been consumed already.

    It ``times_out``, or is found when its request is sent again.
    """
    theirs, ours = source.some_blocks(3, NUM_TOKENS), target.some_blocks(4, NUM_TOKENS)
    offer = await source.prefill.offer(uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids=theirs)
    link.lose()
    fetch = target.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours)
    assert await offer.released() is Outcome.COMPLETED
    assert fetch.notice is None
    if times_out:
        await until(lambda: "StepFailed" in str(story_of(target, fetch)))

    link.restore()

    await fetch.completed()


@pytest.mark.parametrize("request_timeout_s", [0.5, 20.0], ids=["asked anew", "sent again"])
@pytest.mark.parametrize("optimistic", [True, False], ids=["taken", "confirmed"])
async def test_an_offer_whose_last_reply_was_lost_is_a_completed_fetch(
    fresh, optimistic, request_timeout_s
):
    prefill = fresh.prefill(advertise_host=PROXY_HOST)
    decode = fresh.decode(optimistic=optimistic, request_timeout_s=request_timeout_s)
    fresh.start(prefill, decode)
    async with (
        lossy(prefill, "take", "confirm") as link,
        pair(prefill.attach, decode.attach) as (source, target),
    ):
        assert await works(source, target)

        for _ in range(NUM_LOST):
            await hand_over(source, target, link, times_out=request_timeout_s < 1)

        assert link.num_lost >= NUM_LOST
        assert await works(source, target)


@pytest.mark.parametrize("grace_s", [20.0, 0.01], ids=["in its grace", "after it"])
@pytest.mark.parametrize("optimistic", [True, False], ids=["taken", "confirmed"])
async def test_a_yes_that_comes_after_the_deadline_completes_the_fetch_in_its_grace_only(
    fresh, optimistic, grace_s
):
    prefill = fresh.prefill(advertise_host=PROXY_HOST)
    decode = fresh.decode(optimistic=optimistic, confirm_grace_s=grace_s)
    fresh.start(prefill, decode)
    async with (
        lossy(prefill, "take", "confirm") as link,
        pair(prefill.attach, decode.attach) as (source, target),
    ):
        assert await works(source, target)
        theirs, ours = source.some_blocks(3, NUM_TOKENS), target.some_blocks(4, NUM_TOKENS)
        offer = await source.prefill.offer(
            uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids=theirs
        )
        link.lose()
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours, timeout_s=TIMEOUT_S
        )
        overdue_at = time.monotonic() + TIMEOUT_S
        assert await offer.released() is Outcome.COMPLETED

        if grace_s > 1:
            await until(lambda: time.monotonic() > overdue_at + LATE_S)
            assert fetch.notice is None
            link.let_through()
            await fetch.completed()
        else:
            failure = await failure_of(fetch)
            assert (failure.stage, failure.code) == ("confirming", ErrorCode.TIMEOUT)
            assert decode.metric("undecided_fetches_total", code="timeout") == 1
            assert decode.says("handoff.failed", undecided=True)
            link.let_through()
        assert link.num_lost
