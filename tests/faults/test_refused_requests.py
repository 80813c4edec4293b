"""An engine that asks for what cannot be gets a named error at once, and nobody else notices."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvbus.errors import ErrorCode, GeometryError, RequestRefused
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, until
from tests.engines import (
    Engine,
    failure_of,
    pair,
    same,
    works,
)
from tests.plain_sockets import ask

pytestmark = pytest.mark.anyio

Pair = tuple[Engine, Engine]


@pytest.fixture
async def engines(prefill: AgentProcess, decode: AgentProcess) -> AsyncIterator[Pair]:
    """A prefill and a decode engine, between which a handoff must work after each test."""
    async with pair(prefill.attach, decode.attach) as (source, target):
        yield source, target
        assert await works(source, target)


async def refusal_of_offer(source: Engine, agent: AgentProcess, **offer: Any) -> ErrorCode:
    """The code of a refused offer, once it is counted and logged."""
    with pytest.raises(RequestRefused) as refused:
        await source.prefill.offer("bad", **offer)
    code = refused.value.code
    assert agent.metric("refusals_total", code=code.value) >= 1
    assert agent.says("request.refused", op="offer", code=code.value)
    return code


@pytest.mark.parametrize(
    ("num_tokens", "block_ids"),
    [
        (16, {"full": [64]}),
        (32, {"full": [3, 3]}),
        (33, {"full": [1, 2]}),
        (16, {}),
        (16, {"full": [1], "no such group": [1]}),
    ],
    ids=["out of range", "named twice", "too few", "no group", "unknown group"],
)
async def test_an_offer_of_blocks_that_do_not_hold_its_tokens_is_refused(
    engines, prefill, num_tokens, block_ids
):
    code = await refusal_of_offer(engines[0], prefill, num_tokens=num_tokens, block_ids=block_ids)

    assert code is ErrorCode.GEOMETRY


@pytest.mark.parametrize(
    ("num_tokens", "block_ids"),
    [
        (16, {"full": [64]}),
        (32, {"full": [3, 3]}),
        (33, {"full": [1, 2]}),
        (16, {"full": [1, 2]}),
        (16, {}),
    ],
    ids=["out of range", "named twice", "too few", "too many", "no group"],
)
async def test_a_fetch_into_other_blocks_than_its_tokens_need_is_refused(
    engines, decode, num_tokens, block_ids
):
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=48, block_ids={"full": [1, 2, 3]})
    before = target.snapshot()

    fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=block_ids)
    failure = await failure_of(fetch)

    assert failure.code is ErrorCode.GEOMETRY
    assert (failure.stage, failure.blocks_free) == ("requested", True)
    assert decode.says("request.refused", op="fetch", code="geometry")
    assert same(target.snapshot(), before)
    await offer.withdraw()


async def test_an_extension_with_blocks_out_of_range_leaves_the_offer_as_it_was(engines):
    source, _ = engines
    offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]}, sealed=False)

    with pytest.raises(RequestRefused) as refused:
        await offer.extend(32, {"full": [64]})

    assert refused.value.code is ErrorCode.GEOMETRY
    await offer.extend(32, {"full": [2]})
    await offer.withdraw()


async def test_a_fetch_of_more_tokens_than_the_offer_has_fails(engines, decode):
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
    before = target.snapshot()

    fetch = target.decode.fetch(offer.ticket, num_tokens=17, block_ids={"full": [1, 2]})
    failure = await failure_of(fetch)

    assert failure.code is ErrorCode.INVALID
    assert failure.stage == "claiming"
    assert same(target.snapshot(), before)
    assert decode.says("handoff.failed", fetch_id=fetch.fetch_id, code="invalid")
    await offer.withdraw()


async def test_a_request_is_offered_once(engines, prefill):
    source, _ = engines
    offer = await source.prefill.offer("bad", num_tokens=0, block_ids={"full": []})

    code = await refusal_of_offer(source, prefill, num_tokens=0, block_ids={"full": []})

    assert code is ErrorCode.OFFER_EXISTS
    await offer.withdraw()


async def test_a_sealed_offer_does_not_change(engines):
    source, _ = engines
    offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})

    with pytest.raises(RequestRefused) as refused:
        await offer.extend(32, {"full": [2]})

    assert refused.value.code is ErrorCode.OFFER_SEALED
    await offer.withdraw()


async def test_an_offer_is_claimed_after_its_end_in_vain(engines, decode):
    source, target = engines
    read = await source.prefill.offer("read", num_tokens=0, block_ids={"full": []})
    await target.decode.fetch(read.ticket, num_tokens=0, block_ids={"full": []}).completed()
    expired = await source.prefill.offer("late", num_tokens=0, block_ids={"full": []}, ttl_s=0.01)
    withdrawn = await source.prefill.offer("gone", num_tokens=0, block_ids={"full": []})
    await withdrawn.withdraw()
    outcomes = [await offer.released() for offer in (read, expired, withdrawn)]

    codes = []
    for offer in (read, expired, withdrawn):
        fetch = target.decode.fetch(offer.ticket, num_tokens=0, block_ids={"full": []})
        codes.append((await failure_of(fetch)).code)
        assert decode.says("handoff.failed", fetch_id=fetch.fetch_id, code=codes[-1].value)

    assert outcomes == [Outcome.COMPLETED, Outcome.EXPIRED, Outcome.WITHDRAWN]
    assert codes == [
        ErrorCode.OFFER_COMPLETED,
        ErrorCode.OFFER_EXPIRED,
        ErrorCode.OFFER_WITHDRAWN,
    ]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"offer_id": "no such offer"}, ErrorCode.OFFER_UNKNOWN),
        ({"engine_id": "no such engine"}, ErrorCode.ENGINE_UNKNOWN),
        ({"engine_instance": "an earlier one"}, ErrorCode.STALE),
        ({"secret": 32 * "0"}, ErrorCode.FORBIDDEN),
        ({"secret": "short"}, ErrorCode.INVALID),
        ({"agent_boot": "an earlier one"}, ErrorCode.STALE),
        ({"endpoint": "tcp://127.0.0.1:1"}, ErrorCode.PEER_UNREACHABLE),
        ({"endpoint": "no endpoint"}, ErrorCode.INVALID),
        ({"endpoint": "ipc:///tmp/x:1"}, ErrorCode.INVALID),
        ({"offer_id": 7}, ErrorCode.INVALID),
        ({"num_tokens": -1}, ErrorCode.INVALID),
        ({"kvbus": 2}, ErrorCode.UNSUPPORTED_VERSION),
        ({"offer_id": None}, ErrorCode.INVALID),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
async def test_a_ticket_that_opens_nothing_fails_its_fetch_by_name(engines, decode, changes, code):
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []})
    ticket = json.loads(json.dumps({**offer.ticket, **changes}))

    fetch = target.decode.fetch(
        {key: value for key, value in ticket.items() if value is not None},
        num_tokens=0,
        block_ids={"full": []},
    )
    failure = await failure_of(fetch)

    assert failure.code is code
    assert failure.blocks_free
    await until(
        lambda: (
            decode.logged("request.refused", op="fetch", code=code.value)
            or decode.logged("handoff.failed", fetch_id=fetch.fetch_id, code=code.value)
        )
    )
    await offer.withdraw()


async def test_an_offer_withdrawn_before_it_is_claimed_fails_its_fetch(engines):
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
    await offer.withdraw()

    fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
    failure = await failure_of(fetch)

    assert failure.code is ErrorCode.OFFER_WITHDRAWN
    assert await offer.released() is Outcome.WITHDRAWN


async def test_a_router_withdraws_an_offer_and_its_waiting_fetch_fails(engines, prefill):
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []}, sealed=False)
    fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
    await until(lambda: prefill.status()["counts"]["leases"] == 1)
    body = {key: offer.ticket[key] for key in ("agent_boot", "offer_id", "secret")}

    reply = ask(prefill.peer, "withdraw", body)
    failure = await failure_of(fetch)

    assert "ok" in reply
    assert failure.code is ErrorCode.OFFER_WITHDRAWN
    assert failure.blocks_free
    assert await offer.released() is Outcome.WITHDRAWN


async def test_a_fetch_that_waits_is_cancelled_and_its_offer_can_be_read(engines, prefill):
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []}, sealed=False)
    fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
    await until(lambda: prefill.status()["counts"]["leases"] == 1)

    await fetch.cancel()
    failure = await failure_of(fetch)
    await until(lambda: prefill.status()["counts"]["leases"] == 0)

    assert failure.code is ErrorCode.CANCELLED
    assert failure.blocks_free
    await offer.extend(16, {"full": [1]})
    await offer.seal()
    again = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
    await again.completed()


async def test_a_cancel_that_comes_with_the_fetch_or_after_its_end_is_no_error(engines):
    source, target = engines
    offers = [
        await source.prefill.offer(name, num_tokens=16, block_ids={"full": [1]})
        for name in ("early", "late")
    ]

    early = target.decode.fetch(offers[0].ticket, num_tokens=16, block_ids={"full": [1]})
    await early.cancel()
    failure = await failure_of(early)
    late = target.decode.fetch(offers[1].ticket, num_tokens=16, block_ids={"full": [1]})
    await late.completed()
    await late.cancel()

    assert failure.code is ErrorCode.CANCELLED
    await early.blocks_freed()
    await offers[0].withdraw()


async def test_a_fetch_of_an_offer_that_another_reads_waits_for_its_turn(engines, prefill):
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []}, sealed=False)
    first = target.decode.fetch(offer.ticket, num_tokens=0, block_ids={"full": []})
    await until(lambda: prefill.status()["counts"]["leases"] == 1)

    second = target.decode.fetch(offer.ticket, num_tokens=0, block_ids={"full": []}, timeout_s=0.3)
    failure = await failure_of(second)
    await offer.seal()
    await first.completed()

    assert failure.code is ErrorCode.TIMEOUT
    assert failure.stage == "claiming"


async def test_ids_that_are_none_are_refused_before_they_are_sent(engines):
    source, _ = engines

    with pytest.raises(GeometryError):
        await source.prefill.offer("r", num_tokens=16, block_ids={"full": [-1]})
