"""Engines whose memory NIXL is not told of hand KV over through slots, whatever their shapes."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from kvbus.engine import DecodeSession, MemorySession, PrefillSession
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import GroupSpec, KvLayout, KvPart, StatePart, state_group
from tests.agents import AgentProcess, Agents, agents_ended
from tests.e2e.shapes import GROUP, SLOT_BYTES, ShapedAgents, Side, hand_over, two_engines
from tests.e2e.spread_engines import spread_engine
from tests.engines import (
    Engine,
    engine,
    failure_of,
    make_spec,
    pair,
    same,
    works,
)
from tests.memories import Memory

pytestmark = pytest.mark.anyio

HND = KvLayout.parse("HND")
WINDOW = GroupSpec("window", (2, 3), 8, 8, 4, "bfloat16", window=21)
STATE = state_group("state", (4, 5), (StatePart("conv", 6, 10), StatePart("norm", 1, 7)))
LATENT = GroupSpec("latent", (0, 1, 2), 16, 1, 24, "bfloat16", (KvPart.LATENT,))
WHICH = {"prefill": (True, False), "decode": (False, True), "both": (True, True)}
SLOTS = {"slot_bytes": SLOT_BYTES, "staging_bytes": 4 * SLOT_BYTES}


def staged(side: Side, *, only: bool = True) -> Side:
    """The side, its memory unregistered if ``only``."""
    return replace(side, memory=replace(side.memory, direct=not only))


SHAPES = {
    "equal": (Side(), Side()),
    "tp2-3": (Side(tp=2), Side(tp=3)),
    "tp3-2 HND-NHD": (Side(tp=3, memory=Memory(HND)), Side(tp=2)),
    "pp2-3 of other blocks": (Side(pp=2, block_size=48), Side(pp=3, tp=2, block_size=32)),
    "padded-apart": (Side(memory=Memory(padding=2)), Side(memory=Memory(HND, apart=True))),
}


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("path", ["auto", "packed"])
async def test_every_byte_arrives_from_and_in_memory_that_is_staged_only(shapes, path, name, which):
    sides = [staged(s, only=only) for s, only in zip(SHAPES[name], WHICH[which], strict=True)]
    async with two_engines(shapes, path, *sides, groups=(GROUP, WINDOW, STATE)) as pair:
        for num_tokens, first_token in ((71, 0), (71, 60), (13, 5), (71, 71), (0, 0)):
            fetched = await hand_over(
                *pair, num_tokens, first_token=first_token, zero_tail=first_token == 60
            )

            assert (
                fetched.path in ("packed", "reordered") if fetched.num_bytes else not fetched.path
            )


@pytest.mark.parametrize("name", SHAPES)
async def test_boxes_in_the_readers_order_go_from_staged_memory_straight_into_blocks(shapes, name):
    source, target = SHAPES[name]
    sides = staged(source), target
    async with two_engines(shapes, "reordered", *sides, groups=(GROUP, WINDOW, STATE)) as pair:
        fetched = await hand_over(*pair, 71, first_token=5)

        assert fetched.path == "reordered"


async def test_replicas_and_open_offers_need_nothing_of_their_own(shapes):
    sides = staged(Side(tp=4)), staged(Side(tp=3))
    async with two_engines(shapes, "auto", *sides, groups=[LATENT], max_tokens=130) as pair:
        await hand_over(*pair, 130, steps=(17, 64, 100))


async def test_one_staged_rank_among_others_keeps_the_engine_from_direct_reads(shapes):
    spec = make_spec(tp=2, groups=(GROUP,))
    agents = [shapes.prefill] * 2
    async with (
        spread_engine(PrefillSession, agents, spec, staged=[1], seed=1) as source,
        engine(
            DecodeSession, shapes.decode["auto"].attach, make_spec(groups=(GROUP,)), seed=2
        ) as target,
    ):
        fetched = await hand_over(source, target, 71)

        assert fetched.path in ("packed", "reordered")


@pytest.fixture(scope="module")
def shared_sites() -> Iterator[Agents]:
    """Two prefill and two decode agents, ended with its last test."""
    with agents_ended(Agents) as agents:
        for role in ("prefill", "decode"):
            agents.start(*(agents.prepare(role, **SLOTS) for _ in range(2)))
        yield agents


@pytest.fixture
def sites(shared_sites: Agents) -> Iterator[list[AgentProcess]]:
    """The agents, which must hold nothing after each test."""
    yield shared_sites.all
    shared_sites.check()


@pytest.mark.parametrize(
    ("prefill", "decode"), [([0, 1], []), ([], [0, 1]), ([0], [1]), ([1], [0, 1])]
)
async def test_staged_ranks_may_be_at_several_agents(sites, prefill, decode):
    async with (
        spread_engine(PrefillSession, sites[:2], staged=prefill, seed=1) as source,
        spread_engine(DecodeSession, sites[2:], staged=decode, seed=2) as target,
    ):
        assert await works(source, target)
        assert await works(source, target)


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


async def failed_handoff(source: Engine, target: Engine) -> tuple[ErrorCode, str]:
    """Why a fetch did not even start to read; nothing of the target has changed."""
    before = target.snapshot()
    offer = await source.prefill.offer("r", num_tokens=40, block_ids=source.some_blocks(5, 40))
    fetch = target.decode.fetch(
        offer.ticket, num_tokens=40, block_ids=target.some_blocks(6, 40), zero_tail=True
    )
    failure = await failure_of(fetch)
    await offer.withdraw()
    assert failure.blocks_free
    assert same(target.snapshot(), before)
    return failure.code, failure.message


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_agent_without_slots_refuses_memory_that_needs_them(slotless, role):
    agent = slotless[["prefill", "decode"].index(role)]
    async with MemorySession(agent.attach, make_spec(), 0) as session:
        with pytest.raises(RequestRefused, match="'staging_bytes'") as refused:
            await session.allocate(HND, num_blocks=4, direct=False)

    assert refused.value.code is ErrorCode.CONFIG
    assert agent.memory_maps("kvbus-") == 0


async def test_a_staged_decode_engine_cannot_read_from_an_agent_without_slots(shapes, slotless):
    lacking = ShapedAgents(slotless[0], shapes.decode)
    async with two_engines(lacking, "auto", Side(), staged(Side())) as pair:
        code, message = await failed_handoff(*pair)

    assert code is ErrorCode.CONFIG
    assert "the memory of the decode engine is unregistered" in message
    assert f"key 'staging_bytes' is 0 at the prefill agent ({slotless[0].peer})" in message


@pytest.mark.parametrize("which", WHICH)
async def test_a_forced_direct_path_is_refused_with_the_side_that_is_staged(shapes, which):
    sides = [staged(Side(), only=only) for only in WHICH[which]]
    async with two_engines(shapes, "direct", *sides) as pair:
        code, message = await failed_handoff(*pair)

    side = "prefill" if which == "prefill" else "decode"
    assert code is ErrorCode.CONFIG
    assert f"forces 'direct', but the memory of the {side} engine is unregistered" in message


async def test_a_forced_reordered_path_is_refused_when_it_cannot_end_in_the_blocks(shapes):
    async with two_engines(shapes, "reordered", Side(), staged(Side())) as pair:
        code, message = await failed_handoff(*pair)

    assert code is ErrorCode.CONFIG
    assert "forces 'reordered', but the memory of the decode engine is unregistered" in message


async def test_a_decode_agent_without_slots_has_boxes_in_its_engines_order(shapes, slotless):
    lacking = ShapedAgents(shapes.prefill, {"auto": slotless[1]})
    sides = staged(Side(tp=2)), Side(memory=Memory(HND))
    async with two_engines(lacking, "auto", *sides) as pair:
        fetched = await hand_over(*pair, 71)

        assert fetched.path == "reordered"


async def test_a_block_that_fits_no_slot_goes_packed_token_by_token(shapes):
    group = msgspec.structs.replace(GROUP, head_dim=64)  # of one token 2 KiB, of 16 tokens 32
    async with two_engines(shapes, "auto", staged(Side()), Side(), groups=[group]) as pair:
        fetched = await hand_over(*pair, 40)

        assert fetched.path == "packed"


async def test_a_slot_too_small_for_a_token_is_named(shapes):
    group = msgspec.structs.replace(GROUP, head_dim=1024)
    async with two_engines(shapes, "auto", staged(Side()), Side(), groups=[group]) as pair:
        code, message = await failed_handoff(*pair)

    assert code is ErrorCode.GEOMETRY
    assert "slot_bytes" in message


async def test_agents_that_expose_only_their_staging_hand_over_all_the_same():
    with agents_ended(Agents) as agents:
        both = [agents.prepare(role, exposure="staging") for role in ("prefill", "decode")]
        agents.start(*both)
        prefill, decode = both
        async with pair(prefill.attach, decode.attach) as (source, target):
            assert await works(source, target)

        assert prefill.metric("packed_bytes_total") > 0
        assert decode.says("handoff.completed", path="packed")
        agents.check()
