"""What passes through slots: few and small ones that many fetches share, and who has none."""

import uuid
from collections.abc import Iterator, Sequence
from random import Random

import anyio
import msgspec
import pytest

from kvbus.engine import MemorySession
from kvbus.errors import ErrorCode, FetchFailed, RequestRefused
from kvbus.geometry import GroupSpec, KvLayout
from tests.agents import AgentProcess, Agents, agents_ended, until
from tests.engines import Blocks, Engine, failure_of, make_spec, pair, same, works
from tests.expected import expected_after
from tests.memories import Memory
from tests.process.shapes import GROUP, SLOT_BYTES, ShapedAgents, Side, hand_over, two_engines

pytestmark = pytest.mark.anyio

THROUGH_SLOTS = ("packed", pytest.param("reordered", marks=pytest.mark.long))
HND = Memory(KvLayout.parse("HND"))
SIDES = Side(tp=2), Side(tp=3, memory=HND)
STAGED = Side(memory=Memory(direct=False))
LONG = 36000
"""Tokens whose boxes are hundreds."""


@pytest.mark.parametrize("path", THROUGH_SLOTS)
async def test_boxes_are_cut_to_the_slots_and_counted(shapes: ShapedAgents, path: str) -> None:
    prefill = shapes.prefill
    async with two_engines(shapes, path, *SIDES, max_tokens=1000) as (source, target):
        before = prefill.metric("packed_bytes_total"), prefill.metric("gather_seconds_count")
        fetched = await hand_over(source, target, 1000)
        num_bytes = prefill.metric("packed_bytes_total") - before[0]
        num_boxes = prefill.metric("gather_seconds_count") - before[1]

        assert fetched.num_bytes <= num_bytes <= 1.1 * fetched.num_bytes
        assert num_boxes >= num_bytes / SLOT_BYTES


@pytest.mark.parametrize("path", THROUGH_SLOTS)
async def test_many_fetches_share_few_slots_and_none_is_wrong(
    shapes: ShapedAgents, path: str
) -> None:
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
async def test_a_short_fetch_does_not_wait_for_a_long_one(shapes: ShapedAgents, path: str) -> None:
    ended: list[str] = []
    async with (
        two_engines(shapes, path, *SIDES, max_tokens=LONG) as (source, target),
        anyio.create_task_group() as tasks,
    ):

        async def move_and_note(name: str, length: int, given: Blocks, taken: Blocks) -> None:
            await move(source, target, length, given, taken)
            ended.append(name)

        given, taken = source.some_blocks(5, LONG), target.some_blocks(6, LONG)
        spare = []
        for engine, used in ((source, given), (target, taken)):
            assert not isinstance(engine.num_blocks, int)
            free = set(range(engine.num_blocks["full"])) - set(used["full"])
            spare.append({"full": [min(free)]})
        first = target.views()[0, 0, "k"][taken["full"][0]]
        before = first.clone()
        tasks.start_soon(move_and_note, "long", LONG, given, taken)
        await until(lambda: not first.equal(before))
        await move_and_note("short", 16, *spare)

    assert ended == ["short", "long"]


async def test_where_nothing_is_forced_any_choice_is_right(shapes: ShapedAgents) -> None:
    wide = msgspec.structs.replace(GROUP, head_dim=64)  # of one token 2 KiB, of 16 tokens 32
    wider = msgspec.structs.replace(GROUP, head_dim=1024)
    unlike = Side(), Side(tp=2, memory=HND)
    async with two_engines(shapes, "auto", *SIDES, max_tokens=3000) as engines:
        for num_tokens in (1, 40, 3000):
            await hand_over(*engines, num_tokens)
    async with two_engines(shapes, "auto", STAGED, Side(), groups=[wide]) as engines:
        token_by_token = await hand_over(*engines, 40)
    async with two_engines(shapes, "auto", *unlike, groups=[wider]) as engines:
        no_token_fits = await hand_over(*engines, 60)

    assert token_by_token.path == "packed"
    assert no_token_fits.path == "direct"


async def failed_handoff(
    shapes: ShapedAgents, path: str, *sides: Side, groups: Sequence[GroupSpec] = (GROUP,)
) -> FetchFailed:
    """Why a fetch did not even start to read; nothing of the target has changed."""
    async with two_engines(shapes, path, *sides, groups=groups) as (source, target):
        before = target.snapshot()
        offer = await source.prefill.offer("r", num_tokens=40, block_ids=source.some_blocks(5, 40))
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=40, block_ids=target.some_blocks(6, 40), zero_tail=True
        )
        failure = await failure_of(fetch)
        await offer.withdraw()
        assert failure.blocks_free
        assert same(target.snapshot(), before)
    return failure


@pytest.mark.parametrize(
    ("path", "sides", "head_dim"),
    [
        ("packed", (Side(), Side(memory=HND)), 1024),
        ("reordered", (Side(), Side(memory=HND)), 1024),
        ("reordered", (Side(), Side(block_size=256, memory=HND)), 8),
        ("auto", (STAGED, Side()), 1024),
    ],
    ids=["one token", "one token in the reader's order", "one block in that order", "staged"],
)
async def test_a_slot_too_small_is_named_before_any_byte_moves(
    shapes: ShapedAgents, path: str, sides: tuple[Side, Side], head_dim: int
) -> None:
    group = msgspec.structs.replace(GROUP, head_dim=head_dim)
    packed = shapes.prefill.metric("packed_bytes_total")

    failure = await failed_handoff(shapes, path, *sides, groups=[group])

    assert failure.code is ErrorCode.GEOMETRY
    assert "slot_bytes" in str(failure)
    assert shapes.prefill.metric("packed_bytes_total") == packed


@pytest.mark.parametrize(
    ("path", "sides", "whose"),
    [
        ("direct", (STAGED, Side()), "prefill"),
        ("direct", (Side(), STAGED), "decode"),
        ("reordered", (Side(), STAGED), "decode"),
    ],
)
async def test_a_forced_path_is_refused_with_the_side_that_is_staged(
    shapes: ShapedAgents, path: str, sides: tuple[Side, Side], whose: str
) -> None:
    failure = await failed_handoff(shapes, path, *sides)

    assert failure.code is ErrorCode.CONFIG
    assert f"forces '{path}', but the memory of the {whose} engine is unreg" in failure.message


@pytest.fixture(scope="module")
def shared_slotless() -> Iterator[Agents]:
    """A prefill and a decode agent without slots, ended with its last test."""
    with agents_ended(Agents) as agents:
        agents.start(*(agents.prepare(role, staging_bytes=0) for role in ("prefill", "decode")))
        yield agents


@pytest.fixture
def slotless(shared_slotless: Agents) -> Iterator[list[AgentProcess]]:
    """The agents without slots, which must hold nothing after each test."""
    yield shared_slotless.all
    shared_slotless.check()


async def test_an_agent_without_slots_refuses_memory_that_needs_them(
    slotless: list[AgentProcess],
) -> None:
    for agent in slotless:
        async with MemorySession(agent.attach, make_spec(), 0) as session:
            with pytest.raises(RequestRefused, match="'staging_bytes'") as refused:
                await session.allocate(KvLayout.parse("HND"), num_blocks=4, direct=False)

        assert refused.value.code is ErrorCode.CONFIG
        assert agent.memory_maps("kvbus-") == 0


async def test_what_the_agent_of_one_side_lacks_the_other_does_or_names(
    shapes: ShapedAgents, slotless: list[AgentProcess]
) -> None:
    prefill, decode = slotless
    lacking = ShapedAgents(shapes.prefill, {"auto": decode})
    sides = Side(tp=2, memory=Memory(direct=False)), Side(memory=HND)
    async with two_engines(lacking, "auto", *sides) as engines:
        fetched = await hand_over(*engines, 71)
    failure = await failed_handoff(ShapedAgents(prefill, shapes.decode), "auto", Side(), STAGED)

    assert fetched.path == "reordered", "boxes come in the decode engine's order"
    assert failure.code is ErrorCode.CONFIG
    assert "the memory of the decode engine is unregistered" in failure.message
    assert f"key 'staging_bytes' is 0 at the prefill agent ({prefill.peer})" in failure.message


async def test_agents_that_expose_only_their_staging_hand_over_all_the_same(fresh: Agents) -> None:
    prefill, decode = (fresh.prepare(role, exposure="staging") for role in ("prefill", "decode"))
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)

    assert prefill.metric("packed_bytes_total") > 0
    assert decode.says("handoff.completed", path="packed")
