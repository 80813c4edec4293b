"""The memory of ranks with another number of blocks: valid, laid out alike, within its bytes."""

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.geometry import (
    AxisName,
    EngineSpec,
    GroupSpec,
    KvLayout,
    RankSpec,
    Region,
    ResizedRanks,
    StatePart,
    held_heads,
    held_layers,
    lay_out_rank,
    resize_ranks,
    state_group,
    validate_rank,
    validate_ranks,
)
from tests.support.examples import num_examples
from tests.unit.geometry.layouts import Holding, Style, rank_of, styles_of

FULL = GroupSpec("full", (0, 2), 4, 2, 8, "float16")
WINDOW = GroupSpec("window", (1, 3), 2, 2, 3, "int8", window=5)
STATE = state_group("state", (4,), (StatePart("conv", 1, 6), StatePart("ssm", 4, 8)))
ENGINE = EngineSpec("e", "m", 2, (FULL, WINDOW, STATE))


def ranks_in(styles: Mapping[str, Style], num_blocks: Mapping[str, int]) -> list[RankSpec]:
    return [
        rank_of(
            ENGINE,
            rank,
            styles=styles,
            holding={group.name: _held(group, rank) for group in ENGINE.groups},
            num_blocks=num_blocks,
        )
        for rank in range(ENGINE.num_ranks)
    ]


def _held(group: GroupSpec, rank: int) -> Holding:
    heads = {
        part: held_heads(rank, ENGINE.tp_size, group.part_shape(part).num_heads)
        for part in group.parts
    }
    return Holding(held_layers(ENGINE, rank) & {*group.layers}, heads)


def content_of(region: Region) -> tuple[object, ...]:
    return region.group, region.layers, region.parts, region.first_head, region.num_heads


def nesting(region: Region) -> list[AxisName]:
    """The axes in a block, outermost first."""
    axes = [one for one in region.axes if one.size > 1 and one.name is not AxisName.BLOCK]
    return [one.name for one in sorted(axes, key=lambda one: -one.stride_bytes)]


def blocks_of(resized: ResizedRanks) -> dict[str, int]:
    (blocks,) = {tuple(sorted(rank.num_blocks.items())) for rank in resized.ranks}
    return dict(blocks)


@settings(max_examples=num_examples(1500, 60))
@given(
    styles=styles_of(ENGINE.groups),
    num_blocks=st.fixed_dictionaries({group.name: st.integers(1, 9) for group in ENGINE.groups}),
    max_bytes=st.integers(0, 60_000),
)
def test_resized_ranks_are_valid_and_alike(
    styles: dict[str, Style], num_blocks: dict[str, int], max_bytes: int
) -> None:
    ranks = ranks_in(styles, num_blocks)
    try:
        resized = resize_ranks(ENGINE, ranks, max_bytes)
    except GeometryError:
        assert max_bytes < 40_000
        return
    assert resized.size_bytes <= max_bytes
    validate_ranks(ENGINE, resized.ranks)
    for before, after in zip(ranks, resized.ranks, strict=True):
        validate_rank(ENGINE, after)
        assert list(map(content_of, after.regions)) == list(map(content_of, before.regions))
        assert list(map(nesting, after.regions)) == list(map(nesting, before.regions))
    assert blocks_of(resized) == {
        group: space.num_blocks for space in resized.spaces for group in space.groups
    }


@pytest.mark.parametrize("layout", ["NHD", "kv,block,token,head,dim", "head,block,token,dim,kv"])
def test_blocks_are_in_proportion_and_nearly_fill_the_bytes(layout: str) -> None:
    num_blocks = {"full": 800, "window": 200, "state": 50}
    laid_out = KvLayout.parse(layout)
    ranks = [lay_out_rank(ENGINE, rank, laid_out, num_blocks=num_blocks) for rank in range(2)]
    resized = resize_ranks(ENGINE, ranks, 1 << 20)
    blocks = blocks_of(resized)
    assert resized.size_bytes > 0.95 * (1 << 20)
    for group, number in num_blocks.items():
        assert blocks[group] == pytest.approx(number * blocks["full"] / 800, abs=2)


def test_groups_whose_blocks_share_bytes_share_ids() -> None:
    shared = msgspec.structs.replace(FULL, name="shared", layers=(1, 3), window=9)
    engine = EngineSpec("e", "m", 1, (FULL, shared, STATE))
    rank = lay_out_rank(engine, 0, KvLayout.parse("NHD"), num_blocks=7)
    full, others = [one for one in rank.regions if one.group == "full"], list[Region]()
    for region in rank.regions:
        if region.group == "shared":
            twin = full[len(others)]
            others.append(msgspec.structs.replace(twin, group="shared", layers=region.layers))
    states = [one for one in rank.regions if one.group == "state"]
    rank = msgspec.structs.replace(rank, regions=(*full, *others, *states))
    resized = resize_ranks(engine, [rank], 16_000)
    validate_rank(engine, resized.ranks[0])
    assert {one.groups for one in resized.spaces} == {("full", "shared"), ("state",)}
    at = {one.layers: one.offset_bytes for one in resized.ranks[0].regions if one.group != "state"}
    assert (at[0,], at[2,]) == (at[1,], at[3,])


def test_too_few_bytes_are_refused() -> None:
    ranks = [lay_out_rank(ENGINE, rank, KvLayout.parse("NHD"), num_blocks=4) for rank in range(2)]
    with pytest.raises(GeometryError, match="1024 bytes do not hold a block of each group"):
        resize_ranks(ENGINE, ranks, 1024)
