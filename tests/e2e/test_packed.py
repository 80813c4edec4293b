"""The packed paths pass through few and small slots, which many fetches share."""

import uuid
from random import Random

import anyio
import msgspec
import pytest

from kvbus.errors import ErrorCode
from kvbus.geometry import KvLayout
from kvbus.protocol import Outcome
from tests.agents import until
from tests.e2e.shapes import GROUP, SLOT_BYTES, Side, hand_over, two_engines
from tests.engines import Blocks, Engine, expected_after, failure_of, same
from tests.memories import Memory

pytestmark = pytest.mark.anyio

THROUGH_SLOTS = ("packed", "reordered")
HND = Memory(KvLayout.parse("HND"))
SIDES = Side(tp=2), Side(tp=3, memory=HND)
LONG = 36000
"""Tokens whose boxes are hundreds."""


@pytest.mark.parametrize("path", THROUGH_SLOTS)
async def test_boxes_are_cut_to_the_slots_and_counted(shapes, path):
    prefill = shapes.prefill
    async with two_engines(shapes, path, *SIDES, max_tokens=1000) as (source, target):
        before = prefill.metric("packed_bytes_total"), prefill.metric("gather_seconds_count")
        fetched = await hand_over(source, target, 1000)
        num_bytes = prefill.metric("packed_bytes_total") - before[0]
        num_boxes = prefill.metric("gather_seconds_count") - before[1]

        assert fetched.num_bytes <= num_bytes <= 1.1 * fetched.num_bytes
        assert num_boxes >= num_bytes / SLOT_BYTES


@pytest.mark.parametrize("path", THROUGH_SLOTS)
async def test_many_fetches_share_few_slots_and_none_is_wrong(shapes, path):
    lengths = Random(7).sample(range(1, 400), 30)
    total = sum(-(-length // 16) * 16 for length in lengths)
    async with two_engines(shapes, path, *SIDES, max_tokens=total) as (source, target):
        theirs = source.some_blocks(5, total)["full"]
        ours = target.some_blocks(6, total)["full"]
        wanted = target.snapshot()
        parts: list[tuple[int, Blocks, Blocks]] = []
        for length in lengths:
            count = -(-length // 16)
            parts.append((length, {"full": theirs[:count]}, {"full": ours[:count]}))
            theirs, ours = theirs[count:], ours[count:]
        for length, given, taken in parts:
            wanted = expected_after(wanted, source, given, target, taken, num_tokens=length)

        async with anyio.create_task_group() as tasks:
            for part in parts:
                tasks.start_soon(move, source, target, *part)

        assert same(target.snapshot(), wanted)


async def move(source: Engine, target: Engine, length: int, given: Blocks, taken: Blocks) -> None:
    """One handoff."""
    offer = await source.prefill.offer(uuid.uuid4().hex, num_tokens=length, block_ids=given)
    await target.decode.fetch(offer.ticket, num_tokens=length, block_ids=taken).completed()
    await offer.released()


@pytest.mark.parametrize("path", THROUGH_SLOTS)
async def test_a_short_fetch_does_not_wait_for_a_long_one(shapes, path):
    ended: list[str] = []
    async with (
        two_engines(shapes, path, *SIDES, max_tokens=LONG) as (source, target),
        anyio.create_task_group() as tasks,
    ):

        async def move_and_note(name: str, length: int, given: Blocks, taken: Blocks) -> None:
            await move(source, target, length, given, taken)
            ended.append(name)

        given, taken = source.some_blocks(5, LONG), target.some_blocks(6, LONG)
        spare = [
            {"full": sorted(set(range(engine.num_blocks["full"])) - set(used["full"]))[:1]}
            for engine, used in ((source, given), (target, taken))
        ]
        last = taken["full"][0]
        first = target.views()[0, 0, "k"][last]
        before = first.clone()
        tasks.start_soon(move_and_note, "long", LONG, given, taken)
        await until(lambda: not first.equal(before))
        await move_and_note("short", 16, *spare)

    assert ended == ["short", "long"]


@pytest.mark.parametrize("path", THROUGH_SLOTS)
async def test_a_cancelled_fetch_gives_its_slots_back(shapes, path):
    async with two_engines(shapes, path, *SIDES, max_tokens=LONG) as (source, target):
        given, taken = source.some_blocks(5, LONG), target.some_blocks(6, LONG)
        first = target.views()[0, 0, "k"][taken["full"][0]]
        before = first.clone()
        offer = await source.prefill.offer("r", num_tokens=LONG, block_ids=given)
        fetch = target.decode.fetch(offer.ticket, num_tokens=LONG, block_ids=taken)
        await until(lambda: not first.equal(before))

        await fetch.cancel()
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        after = target.snapshot()
        await offer.withdraw()
        await offer.released()

        assert failure.code is ErrorCode.CANCELLED
        await until(lambda: shapes.prefill.idle() and shapes.decode[path].idle())
        assert same(target.snapshot(), after)
        await hand_over(source, target, 100)


@pytest.mark.parametrize("path", THROUGH_SLOTS)
async def test_an_offer_that_is_withdrawn_fails_the_fetch_that_reads_its_boxes(shapes, path):
    async with two_engines(shapes, path, *SIDES, max_tokens=LONG) as (source, target):
        given, taken = source.some_blocks(5, LONG), target.some_blocks(6, LONG)
        first = target.views()[0, 0, "k"][taken["full"][0]]
        before = first.clone()
        offer = await source.prefill.offer("r", num_tokens=LONG, block_ids=given)
        fetch = target.decode.fetch(offer.ticket, num_tokens=LONG, block_ids=taken)
        await until(lambda: not first.equal(before))

        await offer.withdraw()
        failure = await failure_of(fetch)
        await fetch.blocks_freed()

        assert failure.code in (ErrorCode.STALE, ErrorCode.OFFER_WITHDRAWN)
        assert await offer.released() is Outcome.WITHDRAWN
        await hand_over(source, target, 100)


@pytest.mark.parametrize(
    ("path", "sides", "head_dim"),
    [
        ("packed", (Side(), Side(memory=HND)), 1024),
        ("reordered", (Side(), Side(memory=HND)), 1024),
        ("reordered", (Side(), Side(block_size=256, memory=HND)), 8),
    ],
    ids=["one_token", "one_token_in_the_readers_order", "one_block_in_the_readers_order"],
)
async def test_a_slot_too_small_is_named_before_any_byte_moves(shapes, path, sides, head_dim):
    group = msgspec.structs.replace(GROUP, head_dim=head_dim)
    async with two_engines(shapes, path, *sides, groups=[group]) as (source, target):
        before = target.snapshot()
        packed = shapes.prefill.metric("packed_bytes_total")

        offer = await source.prefill.offer("r", num_tokens=20, block_ids=source.some_blocks(5, 20))
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=20, block_ids=target.some_blocks(6, 20)
        )
        failure = await failure_of(fetch)
        await offer.withdraw()

        assert failure.code is ErrorCode.GEOMETRY
        assert "slot_bytes" in str(failure)
        assert same(target.snapshot(), before)
        assert shapes.prefill.metric("packed_bytes_total") == packed


async def test_where_nothing_is_forced_a_slot_too_small_means_the_direct_path(shapes):
    group = msgspec.structs.replace(GROUP, head_dim=1024)
    sides = Side(), Side(tp=2, memory=HND)
    async with two_engines(shapes, "auto", *sides, groups=[group]) as (source, target):
        fetched = await hand_over(source, target, 60)

        assert fetched.path == "direct"


@pytest.mark.parametrize("num_tokens", [1, 40, 3000])
async def test_where_nothing_is_forced_any_choice_is_right(shapes, num_tokens):
    async with two_engines(shapes, "auto", *SIDES, max_tokens=num_tokens) as (source, target):
        await hand_over(source, target, num_tokens)
