"""Every way in which a description of memory can be impossible is refused by the field's name."""

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
    StatePart,
    held_layers,
    state_group,
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


def first_region(**changes: object) -> RankSpec:
    """`RANK` with its first region changed."""
    return replace(RANK, regions=(replace(RANK.regions[0], **changes), *RANK.regions[1:]))


def first_axis(name: AxisName, **changes: int) -> RankSpec:
    """`RANK` with one axis of its first region changed."""
    return first_region(
        axes=tuple(replace(axis, **changes) if axis.name is name else axis for axis in AXES)
    )


RANK_REFUSALS: dict[str, tuple[str, RankSpec]] = {
    "wrong_heads": ("axes.head", first_axis(AxisName.HEAD, size=1)),
    "wrong_dim": ("axes.dim", first_axis(AxisName.DIM, size=3)),
    "wrong_layers": ("axes.layer", first_region(layers=(0, 1))),
    "absent_axis": ("axes.dim", first_region(axes=AXES[:-1])),
    "part_of_no_group": ("parts", first_region(parts=(KvPart.LATENT, KvPart.VALUE))),
    "segment_too_small": ("offset_bytes", replace(RANK, segments=(Segment("kv", 511),))),
    "zero_stride": ("axes.kv", first_axis(AxisName.KV, stride_bytes=0)),
    "axis_into_inner_axes": ("axes.token", first_axis(AxisName.TOKEN, stride_bytes=14)),
    "part_twice": ("parts", first_region(parts=(KvPart.KEY, KvPart.KEY))),
    "regions_the_same": ("regions", first_region(offset_bytes=256)),
    "layer_twice": (
        "regions",
        replace(
            RANK,
            segments=(Segment("kv", 768),),
            regions=(*RANK.regions, replace(RANK.regions[0], offset_bytes=512)),
        ),
    ),
}


@pytest.mark.parametrize("case", RANK_REFUSALS)
def test_an_impossible_rank_is_refused_by_the_field_that_is_wrong(case: str) -> None:
    field, rank = RANK_REFUSALS[case]

    with pytest.raises(GeometryError) as refused:
        validate_rank(ENGINE, rank)

    assert refused.value.detail["field"] == field


def test_a_possible_engine_and_rank_pass_though_an_axis_of_one_index_has_any_stride() -> None:
    validate_engine(ENGINE)
    validate_rank(ENGINE, RANK)
    validate_rank(ENGINE, first_region(axes=(*AXES, Axis(AxisName.LAYER, 1, 3))))


def test_a_state_may_be_optional_and_of_a_layer_that_another_group_has() -> None:
    row = state_group("row", (), (StatePart("row", 1, 4),), optional=True)
    engine = replace(ENGINE, groups=(*ENGINE.groups, row), pp_size=2)

    validate_engine(engine)
    assert [held_layers(engine, rank) for rank in (0, 1)] == [{0}, {1}]


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


@pytest.mark.parametrize("by_block", [True, False], ids=["[block, layer, 2]", "[layer, block, 2]"])
def test_a_large_cache_whose_regions_interleave_is_compared_by_one_of_its_blocks(
    by_block: bool,
) -> None:
    """More spans than a few for each region are refused, so this is the bound on the work."""
    num_blocks, num_layers = 1_000_000, 100
    engine = replace(ENGINE, groups=(replace(ENGINE.groups[0], layers=tuple(range(num_layers))),))
    step, further = (64 * num_layers, 64) if by_block else (64, 64 * num_blocks)
    one_layer = k_and_v_in_one_tensor(num_blocks).regions
    axes = (replace(one_layer[0].axes[0], stride_bytes=step), *one_layer[0].axes[1:])
    regions = [
        replace(one, layers=(layer,), axes=axes, offset_bytes=one.offset_bytes + layer * further)
        for layer in range(num_layers)
        for one in one_layer
    ]
    segments = (Segment("kv", 64 * num_blocks * num_layers),)

    validate_rank(engine, RankSpec(0, segments, tuple(regions)))
    regions[-1] = replace(regions[-1], offset_bytes=regions[-1].offset_bytes - 1)
    with pytest.raises(GeometryError, match="two regions in segment 'kv' overlap"):
        validate_rank(engine, RankSpec(0, segments, tuple(regions)))


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


def over_each_other(**changes: object) -> RankSpec:
    """Layers 0 and 1 at the same bytes, each in a group of its own; the second one changed."""
    first, second = (
        replace(region, offset_bytes=0, group=f"g{at}") for at, region in enumerate(RANK.regions)
    )
    return replace(RANK, regions=(first, replace(second, **changes)))


def test_groups_share_bytes_where_block_b_of_one_only_meets_block_b_of_the_other() -> None:
    groups = [replace(ENGINE.groups[0], name=f"g{at}", layers=(at,)) for at in (0, 1)]
    engine = replace(ENGINE, groups=tuple(groups))
    further = tuple(replace(one, stride_bytes=72) if one is AXES[0] else one for one in AXES)

    validate_rank(engine, over_each_other())
    for changes in ({"offset_bytes": 2}, {"offset_bytes": 64}, {"axes": further}):
        with pytest.raises(GeometryError) as refused:
            validate_rank(engine, over_each_other(**changes))

        assert refused.value.detail["field"] == "regions"
