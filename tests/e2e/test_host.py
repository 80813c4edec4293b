"""Engines that go through a ring exchange KV with each other and with mapped ones, bit for bit."""

from dataclasses import replace

import pytest

from kvbus.geometry import GroupSpec, KvLayout, KvPart, StatePart, state_group
from tests.e2e.shapes import GROUP, PATHS, Side, hand_over, two_engines
from tests.memories import Memory

pytestmark = pytest.mark.anyio

HND = Memory(KvLayout.parse("HND"))
CROSS = Memory(KvLayout.parse("NHD", cross_layer=True))
PADDED = Memory(HND.layout, apart=True, padding=4)
LATENT = GroupSpec("latent", (0, 1, 2), 16, 1, 24, "bfloat16", (KvPart.LATENT,))
WINDOW = GroupSpec("window", (2, 3), 8, 8, 4, "bfloat16", window=21)
STATE = state_group("state", (4, 5), (StatePart("conv", 6, 10), StatePart("norm", 1, 7)))
GROUPS = (GROUP, WINDOW, STATE)

WHO = {"host-mapped": (True, False), "mapped-host": (False, True), "host-host": (True, True)}

SHAPES = {
    "equal": (Side(), Side(), (GROUP,)),
    "tp1-2": (Side(), Side(tp=2), (GROUP,)),
    "tp3-2": (Side(tp=3), Side(tp=2), (GROUP,)),
    "HND-NHD": (Side(memory=HND), Side(), (GROUP,)),
    "cross-padded": (Side(memory=CROSS), Side(memory=PADDED), (GROUP,)),
    "blocks16-64": (Side(block_size=16), Side(block_size=64), (GROUP,)),
    "blocks48-32": (Side(block_size=48), Side(block_size=32), (GROUP,)),
    "latent": (Side(tp=2), Side(tp=4), (LATENT,)),
    "stages": (Side(pp=2), Side(pp=1, tp=2), (GROUP, WINDOW)),
    "all": (
        Side(tp=2, block_size=24, memory=HND),
        Side(tp=3, block_size=10, memory=PADDED),
        GROUPS,
    ),
}


@pytest.fixture(params=WHO)
def who(request: pytest.FixtureRequest) -> tuple[bool, bool]:
    """Whether each side goes through a ring."""
    return WHO[request.param]


def sides(name: str, who: tuple[bool, bool]) -> tuple[Side, Side, tuple[GroupSpec, ...]]:
    """The two sides of a shape, and their groups."""
    prefill, decode, groups = SHAPES[name]
    return replace(prefill, host=who[0]), replace(decode, host=who[1]), groups


@pytest.mark.parametrize("name", SHAPES)
async def test_every_bit_arrives_through_a_ring_whatever_the_shapes(shapes, who, name):
    prefill, decode, groups = sides(name, who)
    async with two_engines(shapes, "auto", prefill, decode, groups=groups) as (source, target):
        await hand_over(source, target, 100)
        await hand_over(source, target, 71, zero_tail=True)


@pytest.mark.parametrize("path", PATHS)
async def test_a_ring_is_read_and_filled_on_every_path(shapes, path):
    prefill, decode, groups = sides("all", (True, True))
    async with two_engines(shapes, path, prefill, decode, groups=groups) as (source, target):
        fetched = await hand_over(source, target, 71)

        assert fetched.path == path


@pytest.mark.parametrize("zero_tail", [False, True], ids=["tail_kept", "tail_zeroed"])
async def test_a_prefix_hit_and_a_partly_filled_last_block_touch_no_other_slot(
    shapes, zero_tail, who
):
    prefill, decode, groups = sides("blocks48-32", who)
    async with two_engines(shapes, "auto", prefill, decode, groups=groups) as (source, target):
        for first_token in (0, 1, 10, 15, 24, 47, 48, 70, 71):
            await hand_over(source, target, 71, first_token=first_token, zero_tail=zero_tail)


async def test_requests_of_no_token_and_of_few_are_requests_like_others(shapes, who):
    prefill, decode, groups = sides("blocks16-64", who)
    async with two_engines(shapes, "auto", prefill, decode, groups=groups) as (source, target):
        for num_tokens in (0, 1, 15, 16, 17, 63, 64, 65):
            await hand_over(source, target, num_tokens)


async def test_a_window_of_which_only_the_tail_was_kept_is_saved_from_there(shapes, who):
    prefill, decode = (
        Side(block_size=size, host=host) for size, host in zip((8, 6), who, strict=True)
    )
    groups = (GROUP, WINDOW)
    async with two_engines(shapes, "auto", prefill, decode, groups=groups) as (source, target):
        await hand_over(source, target, 90, only_tails=True)


@pytest.mark.parametrize("steps", [(0, 7, 24), (25, 26, 55)], ids=str)
async def test_what_is_saved_in_chunks_of_any_size_arrives_like_the_rest(shapes, who, steps):
    prefill, decode, groups = sides("all", who)
    async with two_engines(shapes, "auto", prefill, decode, groups=groups) as (source, target):
        for first_token in (0, 5, 37):
            await hand_over(source, target, 71, first_token=first_token, steps=steps)
