"""An engine that asks for what cannot be gets a named error at once, and nobody else notices."""

import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from kvbus.engine import Fetch
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import BlockTable, GroupSpec
from kvbus.protocol import ExtendOffer, Outcome
from tests.agents import AgentProcess, until
from tests.engines import FULL, Engine, failure_of, pair, same, works
from tests.plain_sockets import ask

pytestmark = pytest.mark.anyio

Pair = tuple[Engine, Engine]
WINDOW = GroupSpec("window", (2, 3), 8, 6, 4, "bfloat16", window=21)
WRONG_BLOCKS: dict[str, tuple[int, dict[str, list[int]]]] = {
    "out of range": (16, {"full": [64]}),
    "named twice": (32, {"full": [3, 3]}),
    "too few": (33, {"full": [1, 2]}),
    "no group": (16, {}),
}


@pytest.fixture
async def engines(prefill: AgentProcess, decode: AgentProcess) -> AsyncIterator[Pair]:
    """A prefill and a decode engine, between which a handoff must work after each test."""
    async with pair(prefill.attach, decode.attach) as (source, target):
        yield source, target
        assert await works(source, target)


def fetch_of(target: Engine, ticket: Any, num_tokens: int = 0, blocks: Any = None) -> Fetch:
    """Of no tokens, if not said otherwise."""
    return target.control.fetch(ticket, num_tokens=num_tokens, block_ids=blocks or {"full": []})


async def code_of(request: Awaitable[object]) -> ErrorCode:
    """Of a request that must be refused."""
    with pytest.raises(RequestRefused) as refused:
        await request
    return refused.value.code


@pytest.mark.parametrize("why", WRONG_BLOCKS)
async def test_an_offer_of_blocks_that_do_not_hold_its_tokens_is_refused(
    engines: Pair, prefill: AgentProcess, why: str
) -> None:
    num_tokens, block_ids = WRONG_BLOCKS[why]

    offer = engines[0].prefill.offer("bad", num_tokens=num_tokens, block_ids=block_ids)

    assert await code_of(offer) is ErrorCode.GEOMETRY
    assert prefill.metric("refusals_total", code="geometry") >= 1
    assert prefill.says("request.refused", op="offer", code="geometry")


@pytest.mark.parametrize("why", [*WRONG_BLOCKS, "too many"])
async def test_a_fetch_into_other_blocks_than_its_tokens_need_is_refused(
    engines: Pair, decode: AgentProcess, why: str
) -> None:
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=48, block_ids={"full": [1, 2, 3]})
    before = target.snapshot()

    wanted = WRONG_BLOCKS.get(why, (16, {"full": [1, 2]}))
    failure = await failure_of(fetch_of(target, offer.ticket, *wanted))

    assert failure.code is ErrorCode.GEOMETRY
    assert (failure.stage, failure.blocks_free) == ("requested", True)
    assert decode.says("request.refused", op="fetch", code="geometry")
    assert same(target.snapshot(), before)
    await offer.withdraw()


async def test_what_a_sealed_offer_has_not_fails_its_fetch_and_touches_nothing(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    """More tokens than it has, or a window that begins before what it kept."""
    async with pair(prefill.attach, decode.attach, groups=(FULL, WINDOW)) as (source, target):
        before = target.snapshot()
        kept: dict[str, Any] = {
            "block_ids": source.some_blocks(5, 60),
            "first_blocks": source.first_blocks(60),
        }
        offer = await source.prefill.offer("r", num_tokens=60, **kept)

        too_many, too_early = [
            await failure_of(fetch_of(target, offer.ticket, number, target.some_blocks(6, number)))
            for number in (61, 40)
        ]
        await offer.withdraw()

        assert (too_many.code, too_early.code) == (ErrorCode.INVALID, ErrorCode.GEOMETRY)
        assert "60" in too_many.message
        assert "window" in too_early.message
        assert same(target.snapshot(), before)


async def test_an_extension_that_is_refused_leaves_the_offer_as_it_was(engines: Pair) -> None:
    source, _ = engines
    offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]}, sealed=False)

    def extended(num_tokens: int, block: int, first_block: int) -> Awaitable[object]:
        """Asked for as other engines may, which go on after an error; the SDK ends the offer."""
        tables = {"full": BlockTable.of([block], first_block=first_block)}
        return source.control.connection.request(ExtendOffer(offer.offer_id, num_tokens, tables))

    again = await code_of(source.prefill.offer("r", num_tokens=0, block_ids={"full": []}))
    out_of_range = await code_of(extended(32, 64, 1))
    await extended(32, 2, 1)
    await offer.seal()
    sealed = await code_of(extended(48, 3, 2))
    await offer.withdraw()

    assert again is ErrorCode.OFFER_EXISTS
    assert out_of_range is ErrorCode.GEOMETRY
    assert sealed is ErrorCode.OFFER_SEALED


async def test_an_extension_that_is_refused_ends_an_offer_of_the_sdk(engines: Pair) -> None:
    source, _ = engines
    offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]}, sealed=False)

    refused = await code_of(offer.extend(32, {"full": [64]}))

    assert refused is ErrorCode.GEOMETRY
    assert await offer.ended is Outcome.WITHDRAWN
    assert offer.error is not None


async def test_an_offer_is_claimed_after_its_end_in_vain(
    engines: Pair, decode: AgentProcess
) -> None:
    source, target = engines
    nothing: dict[str, Any] = {"num_tokens": 0, "block_ids": {"full": []}}
    read = await source.prefill.offer("read", **nothing)
    await fetch_of(target, read.ticket).ended
    expired = await source.prefill.offer("late", **nothing, ttl_s=0.01)
    withdrawn = await source.prefill.offer("gone", **nothing)
    await withdrawn.withdraw()

    for offer, outcome, code in (
        (read, Outcome.COMPLETED, ErrorCode.OFFER_COMPLETED),
        (expired, Outcome.EXPIRED, ErrorCode.OFFER_EXPIRED),
        (withdrawn, Outcome.WITHDRAWN, ErrorCode.OFFER_WITHDRAWN),
    ):
        assert await offer.ended is outcome
        fetch = fetch_of(target, offer.ticket)
        assert (await failure_of(fetch)).code is code
        assert decode.says("handoff.failed", fetch_id=fetch.fetch_id, code=code.value)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"offer_id": "no such offer"}, ErrorCode.OFFER_UNKNOWN),
        ({"engine_id": "no such engine"}, ErrorCode.ENGINE_UNKNOWN),
        ({"engine_instance": "an earlier one"}, ErrorCode.STALE),
        ({"secret": 32 * "0"}, ErrorCode.FORBIDDEN),
        ({"secret": "short"}, ErrorCode.INVALID),
        ({"agent_boot": "an earlier one"}, ErrorCode.STALE),
        ({"endpoint": "ipc:///tmp/x:1"}, ErrorCode.INVALID),
        ({"kvbus": 2}, ErrorCode.UNSUPPORTED_VERSION),
        ({"offer_id": None}, ErrorCode.INVALID),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
async def test_a_ticket_that_opens_nothing_fails_its_fetch_by_name(
    engines: Pair, decode: AgentProcess, changes: dict[str, Any], code: ErrorCode
) -> None:
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []})
    changed = json.loads(json.dumps({**offer.ticket, **changes}))
    ticket = {key: value for key, value in changed.items() if value is not None}

    fetch = fetch_of(target, ticket)
    failure = await failure_of(fetch)

    assert (failure.code, failure.blocks_free) == (code, True)
    await until(
        lambda: (
            decode.logged("request.refused", op="fetch", code=code.value)
            or decode.logged("handoff.failed", fetch_id=fetch.fetch_id, code=code.value)
        )
    )
    await offer.withdraw()


async def test_a_fetch_that_waits_is_cancelled_or_its_offer_withdrawn_by_a_router(
    engines: Pair, prefill: AgentProcess
) -> None:
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []}, sealed=False)
    right = {key: offer.ticket[key] for key in ("agent_boot", "offer_id", "secret")}

    first = fetch_of(target, offer.ticket, 16, {"full": [1]})
    await until(lambda: prefill.status()["counts"]["leases"] == 1)
    await first.cancel()
    cancelled = await failure_of(first)
    await until(lambda: prefill.status()["counts"]["leases"] == 0)
    second = fetch_of(target, offer.ticket, 16, {"full": [1]})
    await until(lambda: prefill.status()["counts"]["leases"] == 1)
    reply = ask(prefill.peer, "withdraw", right)
    withdrawn = await failure_of(second)

    assert "ok" in reply
    assert (cancelled.code, cancelled.blocks_free) == (ErrorCode.CANCELLED, True)
    assert (withdrawn.code, withdrawn.blocks_free) == (ErrorCode.OFFER_WITHDRAWN, True)
    assert await offer.ended is Outcome.WITHDRAWN
