"""An engine that asks for what cannot be gets a named error at once, and nobody else notices."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import GroupSpec
from kvbus.protocol import Outcome
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


async def refusal_of_offer(source: Engine, agent: AgentProcess, **offer: Any) -> ErrorCode:
    """The code of a refused offer, once it is counted and logged."""
    with pytest.raises(RequestRefused) as refused:
        await source.prefill.offer("bad", **offer)
    code = refused.value.code
    assert agent.metric("refusals_total", code=code.value) >= 1
    assert agent.says("request.refused", op="offer", code=code.value)
    return code


@pytest.mark.parametrize("why", [*WRONG_BLOCKS, "unknown group"])
async def test_an_offer_of_blocks_that_do_not_hold_its_tokens_is_refused(
    engines: Pair, prefill: AgentProcess, why: str
) -> None:
    unknown = (16, {"full": [1], "no such group": [1]})
    num_tokens, block_ids = WRONG_BLOCKS.get(why, unknown)

    code = await refusal_of_offer(engines[0], prefill, num_tokens=num_tokens, block_ids=block_ids)

    assert code is ErrorCode.GEOMETRY


@pytest.mark.parametrize("why", [*WRONG_BLOCKS, "too many"])
async def test_a_fetch_into_other_blocks_than_its_tokens_need_is_refused(
    engines: Pair, decode: AgentProcess, why: str
) -> None:
    num_tokens, block_ids = WRONG_BLOCKS.get(why, (16, {"full": [1, 2]}))
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


async def test_what_a_sealed_offer_has_not_fails_its_fetch_and_touches_nothing(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    """More tokens than it has, or a window that begins before what it kept."""
    async with pair(prefill.attach, decode.attach, groups=(FULL, WINDOW)) as (source, target):
        before = target.snapshot()
        offer = await source.prefill.offer(
            "r",
            num_tokens=60,
            block_ids=source.some_blocks(5, 60),
            first_blocks=source.first_blocks(60),
        )
        failures = [
            await failure_of(
                target.decode.fetch(
                    offer.ticket, num_tokens=number, block_ids=target.some_blocks(6, number)
                )
            )
            for number in (61, 40)
        ]
        await offer.withdraw()

        assert [failure.code for failure in failures] == [ErrorCode.INVALID, ErrorCode.GEOMETRY]
        assert "60" in failures[0].message
        assert "window" in failures[1].message
        assert same(target.snapshot(), before)


async def test_an_extension_that_is_refused_leaves_the_offer_as_it_was(
    engines: Pair, prefill: AgentProcess
) -> None:
    source, _ = engines
    offer = await source.prefill.offer("bad", num_tokens=16, block_ids={"full": [1]}, sealed=False)

    again = await refusal_of_offer(source, prefill, num_tokens=0, block_ids={"full": []})
    with pytest.raises(RequestRefused) as out_of_range:
        await offer.extend(32, {"full": [64]})
    await offer.extend(32, {"full": [2]})
    await offer.seal()
    with pytest.raises(RequestRefused) as sealed:
        await offer.extend(48, {"full": [3]})
    await offer.withdraw()

    assert again is ErrorCode.OFFER_EXISTS
    assert out_of_range.value.code is ErrorCode.GEOMETRY
    assert sealed.value.code is ErrorCode.OFFER_SEALED


async def test_an_offer_is_claimed_after_its_end_in_vain(
    engines: Pair, decode: AgentProcess
) -> None:
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
        ({"endpoint": "ipc:///tmp/x:1"}, ErrorCode.INVALID),
        ({"num_tokens": -1}, ErrorCode.INVALID),
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
    ticket = json.loads(json.dumps({**offer.ticket, **changes}))
    ticket = {key: value for key, value in ticket.items() if value is not None}

    fetch = target.decode.fetch(ticket, num_tokens=0, block_ids={"full": []})
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


async def test_a_router_withdraws_an_offer_and_its_waiting_fetch_fails(
    engines: Pair, prefill: AgentProcess
) -> None:
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


async def test_a_fetch_that_waits_is_cancelled_and_its_offer_can_be_read(
    engines: Pair, prefill: AgentProcess
) -> None:
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
