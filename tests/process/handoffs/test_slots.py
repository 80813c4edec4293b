"""Few small slots that many fetches share, and agents without slots."""

import uuid
from collections.abc import Sequence
from itertools import islice
from random import Random

import anyio
import msgspec
import pytest

from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import KvLayout
from tests.process.handoffs.shapes import GROUP, SLOT_BYTES, ShapedAgents, Side, two_engines
from tests.support.agents import Agents, until
from tests.support.engines import (
    Blocks,
    Engine,
    begin,
    failure_of,
    hand_over,
    make_spec,
    pair,
    rank_link,
    same,
    works,
)
from tests.support.expected import expected_after
from tests.support.memories import Memory

pytestmark = pytest.mark.anyio

HND = Memory(KvLayout.parse("HND"))
REORDERING = Side(), Side(memory=HND)
UNREGISTERED = Side(memory=Memory(direct=False))
LONG = 20_000
"""Tokens of hundreds of tiles."""


def parts_of(one: Engine, lengths: Sequence[int]) -> list[Blocks]:
    ids = iter(one.some_blocks(5, sum(-(-length // 16) * 16 for length in lengths))["full"])
    return [{"full": list(islice(ids, -(-length // 16)))} for length in lengths]


async def test_long_and_short_fetches_share_slots_and_none_is_wrong(shapes: ShapedAgents) -> None:
    lengths = [LONG, *Random(7).sample(range(1, 400), 30)]
    ended: list[int] = []
    sides = Side(tp=2), Side(tp=3, memory=HND)
    packed = [
        shapes.prefill.metric(name) for name in ("packed_bytes_total", "gather_seconds_count")
    ]
    async with two_engines(shapes, "packed", *sides, max_tokens=LONG + 30 * 400) as (
        source,
        target,
    ):

        async def move(length: int, theirs: Blocks, ours: Blocks) -> None:
            offer = await source.prefill.offer(
                uuid.uuid4().hex, num_tokens=length, block_ids=theirs
            )
            fetch = target.decode.fetch(offer.ticket, num_tokens=length, block_ids=ours)
            await fetch.ended
            ended.append(length)
            await offer.ended

        parts = list(
            zip(lengths, parts_of(source, lengths), parts_of(target, lengths), strict=True)
        )
        before = wanted = target.snapshot()
        for length, theirs, ours in parts:
            wanted = expected_after(wanted, source, theirs, target, ours, num_tokens=length)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(move, *parts[0])
            await until(lambda: not same(target.memories(), before))
            for part in parts[1:]:
                tasks.start_soon(move, *part)
        assert same(target.snapshot(), wanted)
    num_bytes, num_tiles = (
        shapes.prefill.metric(name) - was
        for name, was in zip(("packed_bytes_total", "gather_seconds_count"), packed, strict=True)
    )
    assert ended[0] != LONG, "the first short one waited for all of it"
    assert num_tiles >= num_bytes / SLOT_BYTES
    for agent in (shapes.prefill, shapes.decode["packed"]):
        assert agent.memory_maps("libtorch") == 0


async def test_auto_path_cuts_by_token_or_reads_direct_if_no_slot_fits(
    shapes: ShapedAgents,
) -> None:
    wide = msgspec.structs.replace(GROUP, head_dim=64)  # of one token 2 KiB, of 16 tokens 32
    wider = msgspec.structs.replace(GROUP, head_dim=1024)
    async with two_engines(shapes, "auto", UNREGISTERED, Side(), groups=[wide]) as engines:
        token_by_token = await hand_over(*engines, 40)
    async with two_engines(
        shapes, "auto", Side(), Side(tp=2, memory=HND), groups=[wider]
    ) as engines:
        no_token_fits = await hand_over(*engines, 60)
    assert token_by_token.path == "packed"
    assert no_token_fits.path == "direct"


TOO_SMALL = ErrorCode.GEOMETRY, "slot_bytes"


@pytest.mark.parametrize(
    ("path", "sides", "head_dim", "error"),
    [
        ("packed", REORDERING, 1024, TOO_SMALL),
        ("auto", (UNREGISTERED, Side()), 1024, TOO_SMALL),
        ("direct", (UNREGISTERED, Side()), 8, (ErrorCode.CONFIG, "prefill engine is unreg")),
        ("direct", (Side(), UNREGISTERED), 8, (ErrorCode.CONFIG, "decode engine is unreg")),
        ("staged", (UNREGISTERED, Side()), 8, (ErrorCode.CONFIG, "prefill engine is unreg")),
        ("staged", REORDERING, 1024, (ErrorCode.CONFIG, "larger than a slot")),
    ],
    ids=[
        "one token is too large",
        "unregistered",
        "prefill engine is unregistered",
        "decode engine is unregistered",
        "staged, prefill engine is unregistered",
        "staged, one block is too large",
    ],
)
async def test_impossible_path_is_refused_by_name_before_bytes_move(
    shapes: ShapedAgents,
    path: str,
    sides: tuple[Side, Side],
    head_dim: int,
    error: tuple[ErrorCode, str],
) -> None:
    group = msgspec.structs.replace(GROUP, head_dim=head_dim)
    packed = shapes.prefill.metric("packed_bytes_total")
    async with two_engines(shapes, path, *sides, groups=[group]) as (source, target):
        before = target.snapshot()
        handoff = await begin(source, target, zero_tail=True)
        failure = await failure_of(handoff.fetch)
        await handoff.offer.withdraw()
        code, words = error
        assert (failure.code, failure.blocks_free) == (code, True)
        assert words in str(failure)
        assert same(target.snapshot(), before)
    assert shapes.prefill.metric("packed_bytes_total") == packed


async def test_an_agent_without_slots_refuses_memory_that_needs_them(fresh: Agents) -> None:
    prefill, decode = fresh.both(staging_bytes=0)
    for agent in (prefill, decode):
        link, _ = rank_link(
            agent.attach, make_spec(), 0, layout=HND.layout, num_blocks=4, direct=False
        )
        with pytest.raises(RequestRefused, match="'staging_bytes'") as refused:
            await link.__aenter__()
        assert refused.value.code is ErrorCode.CONFIG
        assert agent.memory_maps("kvbus-") == 0


async def test_agents_exposing_only_staging_still_hand_over(fresh: Agents) -> None:
    prefill, decode = fresh.both(decode={"request_timeout_s": 60.0}, exposure="staging")
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
    assert decode.says("handoff.completed", path="packed")
