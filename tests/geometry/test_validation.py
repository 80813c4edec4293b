"""Every way in which a description of memory can be impossible is refused by the field's name."""

from collections.abc import Callable

import msgspec
import pytest

from kvbus.errors import GeometryError
from kvbus.geometry import (
    Axis,
    AxisName,
    EngineSpec,
    GroupSpec,
    KvPart,
    RankSpec,
    Region,
    Segment,
    validate_engine,
    validate_rank,
)

replace = msgspec.structs.replace
PARTS = (KvPart.KEY, KvPart.VALUE)
AXES = (
    Axis(AxisName.BLOCK, 4, 64),
    Axis(AxisName.KV, 2, 32),
    Axis(AxisName.TOKEN, 2, 16),
    Axis(AxisName.HEAD, 2, 8),
    Axis(AxisName.DIM, 4, 2),
)
ENGINE = EngineSpec("e", "m", 1, (GroupSpec("full", (0, 1), 2, 2, 4, "float16", PARTS),))
RANK = RankSpec(
    rank=0,
    segments=(Segment("kv", 512),),
    regions=tuple(
        Region("kv", 256 * layer, "full", (layer,), PARTS, 0, 2, AXES) for layer in (0, 1)
    ),
)
"""Two layers of K and V in one tensor each."""


def first_region(rank: RankSpec, **changes: object) -> RankSpec:
    """``rank`` with its first region changed."""
    changed = replace(rank.regions[0], **changes)
    return replace(rank, regions=(changed, *rank.regions[1:]))


def first_axis(rank: RankSpec, name: AxisName, **changes: int) -> RankSpec:
    """``rank`` with one axis of its first region changed."""
    axes = tuple(
        replace(axis, **changes) if axis.name is name else axis for axis in rank.regions[0].axes
    )
    return first_region(rank, axes=axes)


RANK_REFUSALS: dict[str, tuple[str, Callable[[RankSpec], RankSpec]]] = {
    "wrong_heads": ("axes.head", lambda r: first_axis(r, AxisName.HEAD, size=1)),
    "wrong_dim": ("axes.dim", lambda r: first_axis(r, AxisName.DIM, size=3)),
    "wrong_layers": ("axes.layer", lambda r: first_region(r, layers=(0, 1))),
    "absent_axis": ("axes.dim", lambda r: first_region(r, axes=r.regions[0].axes[:-1])),
    "part_of_no_group": (
        "parts",
        lambda r: first_region(r, parts=(KvPart.LATENT, KvPart.VALUE)),
    ),
    "segment_too_small": ("offset_bytes", lambda r: replace(r, segments=(Segment("kv", 511),))),
    "zero_stride": ("axes.kv", lambda r: first_axis(r, AxisName.KV, stride_bytes=0)),
    "axis_into_inner_axes": (
        "axes.token",
        lambda r: first_axis(r, AxisName.TOKEN, stride_bytes=14),
    ),
    "part_twice": ("regions", lambda r: first_region(r, parts=(KvPart.KEY, KvPart.KEY))),
    "regions_the_same": ("regions", lambda r: first_region(r, offset_bytes=256)),
}


@pytest.mark.parametrize("case", RANK_REFUSALS)
def test_an_impossible_rank_is_refused_by_the_field_that_is_wrong(case: str) -> None:
    field, change = RANK_REFUSALS[case]

    with pytest.raises(GeometryError) as refused:
        validate_rank(ENGINE, change(RANK))

    assert refused.value.detail["field"] == field


def test_a_layer_that_is_held_twice_at_different_bytes_is_refused() -> None:
    again = replace(RANK.regions[0], offset_bytes=512)
    rank = replace(RANK, segments=(Segment("kv", 768),), regions=(*RANK.regions, again))

    with pytest.raises(GeometryError, match="twice") as refused:
        validate_rank(ENGINE, rank)

    assert refused.value.detail["field"] == "regions"


def test_a_possible_engine_and_rank_pass() -> None:
    validate_engine(ENGINE)
    validate_rank(ENGINE, RANK)


def test_a_stride_of_an_axis_with_one_index_does_not_matter() -> None:
    odd = Axis(AxisName.LAYER, 1, 3)

    validate_rank(
        ENGINE,
        first_region(RANK, axes=(*RANK.regions[0].axes, odd)),
    )


def k_and_v_in_one_tensor(num_blocks: int, *, v_offset: int = 32, v_step: int = 64) -> RankSpec:
    """One layer of `ENGINE` whose K and V are regions of 32 bytes a block."""
    inner = (Axis(AxisName.TOKEN, 2, 16), Axis(AxisName.HEAD, 2, 8), Axis(AxisName.DIM, 4, 2))
    regions = tuple(
        Region(
            "kv", at, "full", (0,), (part,), 0, 2, (Axis(AxisName.BLOCK, num_blocks, by), *inner)
        )
        for part, at, by in ((KvPart.KEY, 0, 64), (KvPart.VALUE, v_offset, v_step))
    )
    return RankSpec(0, (Segment("kv", (num_blocks + 1) * (64 + v_step)),), regions)


MOST_BLOCKS = 2**31 - 1
ONE_LAYER = replace(ENGINE, groups=(replace(ENGINE.groups[0], layers=(0,)),))


@pytest.mark.parametrize("v_offset", [32, 64 + 32, 1000 * 64 + 32])
def test_regions_of_one_tensor_are_compared_however_many_blocks_there_are(v_offset: int) -> None:
    validate_rank(ONE_LAYER, k_and_v_in_one_tensor(MOST_BLOCKS, v_offset=v_offset))


@pytest.mark.parametrize("v_offset", [31, 33, 64 + 31, 1000 * 64 + 33])
def test_one_byte_that_two_regions_share_is_found_however_many_blocks_there_are(
    v_offset: int,
) -> None:
    with pytest.raises(GeometryError, match="two regions in segment 'kv' overlap") as refused:
        validate_rank(ONE_LAYER, k_and_v_in_one_tensor(MOST_BLOCKS, v_offset=v_offset))

    assert refused.value.detail["field"] == "regions"


def test_regions_that_interleave_in_too_many_ways_are_refused_before_any_is_made() -> None:
    with pytest.raises(GeometryError, match="interleave in more than") as refused:
        validate_rank(ONE_LAYER, k_and_v_in_one_tensor(MOST_BLOCKS, v_step=65))

    assert refused.value.detail["field"] == "regions"


TWO_GROUPS = replace(
    ENGINE,
    groups=tuple(replace(ENGINE.groups[0], name=f"g{at}", layers=(at,)) for at in (0, 1)),
)


def over_each_other(**changes: object) -> RankSpec:
    """Layers 0 and 1 at the same bytes, each in a group of its own; the second one changed."""
    first, second = (
        replace(region, offset_bytes=0, group=f"g{at}") for at, region in enumerate(RANK.regions)
    )
    return replace(RANK, regions=(first, replace(second, **changes)))


def test_groups_share_bytes_where_block_b_of_one_only_meets_block_b_of_the_other() -> None:
    validate_rank(TWO_GROUPS, over_each_other())


SHARED_REFUSALS: dict[str, dict[str, object]] = {
    "reaches_into_the_next_block": {"offset_bytes": 2},
    "meets_another_block": {"offset_bytes": 64},
    "steps_further": {
        "axes": tuple(
            replace(axis, stride_bytes=72) if axis.name is AxisName.BLOCK else axis
            for axis in RANK.regions[0].axes
        )
    },
}


@pytest.mark.parametrize("case", SHARED_REFUSALS)
def test_groups_whose_blocks_of_different_ids_share_bytes_are_refused(case: str) -> None:
    with pytest.raises(GeometryError) as refused:
        validate_rank(TWO_GROUPS, over_each_other(**SHARED_REFUSALS[case]))

    assert refused.value.detail["field"] == "regions"
