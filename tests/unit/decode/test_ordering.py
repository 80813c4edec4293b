"""Fetches wait for the GPU work that may still use their blocks."""

from typing import Any

import pytest

from kvbus.engine import Outcome
from kvbus.errors import ErrorCode
from tests.support.agents import until
from tests.support.engines import failure_of
from tests.support.pageless import link_without_page
from tests.unit.decode.neighbours import Neighbours

pytestmark = pytest.mark.anyio

ONE: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [3]}}


async def parks(both: Neighbours, number: int) -> None:
    await until(lambda: both.service.counts()["waiting_requests"] == number)


async def test_cancel_keeps_its_order_behind_a_parked_fetch(both: Neighbours) -> None:
    async with both.engines() as (source, target):
        offer = await source.control.offer("r", **ONE)
        fetch = target.control.fetch(offer.ticket, after=7, **ONE)
        cancelled = fetch.cancel(release_offer=True)
        await parks(both, 2)
        assert (cancelled.done(), fetch.ended.done()) == (False, False)
        target.control.record(7)
        await cancelled
        assert (await failure_of(fetch)).code is ErrorCode.CANCELLED
        assert await offer.ended is Outcome.WITHDRAWN


@pytest.mark.parametrize(("wait_s", "timeout_s"), [(0.05, 60.0), (60.0, 0.05)])
async def test_fetch_of_number_that_never_comes_times_out(
    both: Neighbours, wait_s: float, timeout_s: float
) -> None:
    both.service.ordering.wait_s = wait_s
    async with both.engines() as (source, target):
        offer = await source.control.offer("r", **ONE)
        fetch = target.control.fetch(offer.ticket, after=7, timeout_s=timeout_s, **ONE)
        failure = await failure_of(fetch)
        assert (failure.code, failure.stage) == (ErrorCode.TIMEOUT, "requested")
        assert "number 7" in failure.message
        assert fetch.are_blocks_free
        await target.control.fetch(offer.ticket, after=target.control.record(), **ONE).ended
        assert await offer.ended is Outcome.COMPLETED


async def test_wait_counts_towards_the_deadline_of_the_fetch(both: Neighbours) -> None:
    async with both.engines() as (source, target):
        offer = await source.control.offer("r", sealed=False, **ONE)
        fetch = target.control.fetch(offer.ticket, after=7, timeout_s=3.0, **ONE)
        since = both.decode.agent.loop.time()
        await until(lambda: both.decode.agent.loop.time() > since + 2.0)
        target.control.record(7)
        failure = await failure_of(fetch)
        assert failure.code is ErrorCode.TIMEOUT
        assert failure.stage == "waiting"
        assert both.decode.agent.loop.time() < since + 4.9
        await offer.withdraw()


async def test_lost_engine_leaves_no_parked_fetch(both: Neighbours) -> None:
    async with both.engines() as (source, target):
        offer = await source.control.offer("r", **ONE)
        fetch = target.control.fetch(offer.ticket, after=7, **ONE)
        await parks(both, 1)
        await target.control.aclose()
        await parks(both, 0)
        assert fetch.notice is not None
        await offer.withdraw()


async def test_fetch_of_engine_without_page_is_refused_by_name(both: Neighbours) -> None:
    async with both.engines() as (source, _):
        offer = await source.control.offer("r", **ONE)
        async with link_without_page(both.decode.config.attach_path) as target:
            failure = await failure_of(target.fetch(offer.ticket, after=7, **ONE))
        await offer.withdraw()
    assert failure.code is ErrorCode.SEGMENT
    assert "no page of sequence words" in failure.message
