"""Invalid requests of an engine fail by name, and affect no other engine."""

import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from kvbus.engine import Fetch
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import MAX_BLOCKS, BlockTable, GroupSpec
from kvbus.protocol import ExtendOffer, Outcome
from tests.process.refused.conftest import code_of
from tests.support.agents import AgentProcess, until
from tests.support.engines import FULL, Engine, failure_of, pair, same, works

pytestmark = pytest.mark.anyio

Pair = tuple[Engine, Engine]
WINDOW = GroupSpec("window", (2, 3), 8, 6, 4, "bfloat16", window=21)
WRONG_BLOCKS: dict[str, tuple[int, dict[str, list[int]]]] = {
    "out of range": (16, {"full": [64]}),
    "named twice": (32, {"full": [3, 3]}),
    "too few": (33, {"full": [1, 2]}),
    "no group": (16, {}),
    "too many": (16, {"full": [1, 2]}),
}


@pytest.fixture
async def engines(prefill: AgentProcess, decode: AgentProcess) -> AsyncIterator[Pair]:
    async with pair(prefill.attach, decode.attach) as (source, target):
        yield source, target
        assert await works(source, target)


def fetch_of(target: Engine, ticket: Any, num_tokens: int = 0, blocks: Any = None) -> Fetch:
    return target.control.fetch(ticket, num_tokens=num_tokens, block_ids=blocks or {"full": []})


async def test_blocks_not_holding_tokens_are_refused_on_both_sides(
    engines: Pair, prefill: AgentProcess, decode: AgentProcess
) -> None:
    """`tests/unit/prefill/test_tables.py` tests the tables of offers."""
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=48, block_ids={"full": [1, 2, 3]})
    before = target.snapshot()
    for why, wrong in WRONG_BLOCKS.items():
        failure = await failure_of(fetch_of(target, offer.ticket, *wrong))
        told = (failure.code, failure.stage, failure.blocks_free)
        assert told == (ErrorCode.GEOMETRY, "requested", True), why
    too_few = source.prefill.offer("bad", num_tokens=33, block_ids={"full": [1, 2]})
    assert await code_of(too_few) is ErrorCode.GEOMETRY
    assert decode.says("request.refused", op="fetch", code="geometry")
    assert prefill.says("request.refused", op="offer", code="geometry")
    assert prefill.metric("refusals_total", code="geometry") >= 1
    assert same(target.snapshot(), before)
    await offer.withdraw()


async def test_too_large_table_is_refused_with_size_limit_and_remedy(engines: Pair) -> None:
    source, target = engines
    too_many = {"full": range(MAX_BLOCKS + 1)}
    num_tokens = FULL.block_size * (MAX_BLOCKS + 1)
    offer = await source.prefill.offer("short", num_tokens=16, block_ids={"full": [1]})
    failure = await failure_of(fetch_of(target, offer.ticket, num_tokens, too_many))
    await offer.withdraw()
    with pytest.raises(RequestRefused) as refused:
        await source.prefill.offer("r", num_tokens=num_tokens, block_ids=too_many).made
    for message in (failure.message, refused.value.message):
        assert "has 1,048,577 blocks, 1,048,576 at most: use larger blocks" in message


async def test_fetch_beyond_sealed_offer_fails_and_writes_nothing(
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


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"offer_id": "no such offer"}, ErrorCode.OFFER_UNKNOWN),
        ({"engine_id": "no such engine"}, ErrorCode.ENGINE_UNKNOWN),
        ({"engine_instance": "an earlier one"}, ErrorCode.ENGINE_LOST),
        ({"secret": 32 * "0"}, ErrorCode.FORBIDDEN),
        ({"secret": "short"}, ErrorCode.INVALID),
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
