"""Descriptions of engines, ranks and tiles that cannot be are refused, by their field.

Pairs of engines that do not fit: see `tests/unit/planning/test_compatibility.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kvbus.errors import ErrorCode, GeometryError
from kvbus.geometry import (
    Axis,
    AxisName,
    EngineSpec,
    GroupSpec,
    KvLayout,
    KvPart,
    RankSpec,
    Region,
    Segment,
    StatePart,
    Tile,
    held_layers,
    lay_out_rank,
    slot_region,
    state_group,
    validate_engine,
    validate_rank,
)

FULL = GroupSpec("full", (0, 1), 2, 2, 4, "float16")
SPEC = EngineSpec("e", "m", 1, (FULL,))
AXES = (
    Axis(AxisName.BLOCK, 4, 64),
    Axis(AxisName.KV, 2, 32),
    Axis(AxisName.TOKEN, 2, 16),
    Axis(AxisName.HEAD, 2, 8),
    Axis(AxisName.DIM, 4, 2),
)
NUM_BYTES = 512
RANK = RankSpec(
    rank=0,
    segments=(Segment("kv", NUM_BYTES),),
    regions=tuple(
        Region("kv", 256 * layer, "full", (layer,), FULL.parts, 0, 2, AXES) for layer in (0, 1)
    ),
)
"""Two layers of K and V in one tensor each."""
STATE = state_group("state", (2,), (StatePart("conv", 4, 6), StatePart("norm", 1, 3)))
MIXED = EngineSpec("e", "m", 1, (FULL, STATE))

Refused = Callable[[], object]


def engine_of(*groups: GroupSpec, **changes: Any) -> Refused:
    return lambda: validate_engine(replace(SPEC, groups=groups or SPEC.groups, **changes))


def rank_of(**changes: Any) -> Refused:
    return lambda: validate_rank(SPEC, replace(RANK, **changes))


def region_of(**changes: Any) -> Refused:
    return rank_of(regions=(replace(RANK.regions[0], **changes), *RANK.regions[1:]))


def axes_of(**changes: tuple[int, int]) -> Refused:
    axes = tuple(
        Axis(axis.name, *changes.get(axis.name.value, (axis.size, axis.stride_bytes)))
        for axis in RANK.regions[0].axes
    )
    return region_of(axes=axes)


def state_with(**changes: Any) -> Refused:
    return engine_of(FULL, replace(STATE, **changes))


def mixed_region() -> None:
    rank = lay_out_rank(MIXED, 0, KvLayout.parse("NHD"), num_blocks=2)
    together = replace(rank.regions[-1], parts=("conv", "norm"))
    validate_rank(MIXED, replace(rank, regions=(*rank.regions[:-2], together)))


def tile_of(group: GroupSpec = FULL, **changes: Any) -> Refused:
    tile = replace(Tile("full", (0,), ("k",), 0, 1, 0, 4), **changes)
    return lambda: slot_region(group, tile)


HEADLESS = tuple(axis for axis in RANK.regions[1].axes if axis.name is not AxisName.HEAD)
OTHER_HEAD = replace(RANK.regions[1], first_head=1, num_heads=1, axes=HEADLESS)
CASES: dict[tuple[str, str], list[Refused]] = {
    ("two groups of one name", "groups"): [engine_of(FULL, replace(FULL, layers=(2,)))],
    ("a layer in two groups, or twice in one", "layers"): [
        engine_of(FULL, replace(FULL, name="b")),
        engine_of(replace(FULL, layers=(0, 0))),
    ],
    ("an unknown dtype", "dtype"): [engine_of(replace(FULL, dtype="int3"))],
    ("a part named twice in a group", "parts"): [engine_of(replace(FULL, parts=("k", "k")))],
    (
        "a state with a window, blocks of several tokens, or other parts than it describes",
        "state",
    ): [
        state_with(window=3),
        state_with(block_size=2),
        state_with(dtype="float16"),
        *(state_with(parts=parts) for parts in (("conv",), ("norm", "conv"), ("conv", "other"))),
    ],
    ("a rank number from `tp_size * pp_size` on", "rank"): [rank_of(rank=1)],
    ("two segments of one id", "segments"): [rank_of(segments=RANK.segments * 2)],
    ("a region of a group that is not there", "group"): [region_of(group="none")],
    ("a region in a segment that is not there", "segment_id"): [region_of(segment_id="none")],
    ("an axis named twice", "axes"): [region_of(axes=RANK.regions[0].axes[:1] * 2)],
    ("a region with a layer that is not its group's, or twice", "layers"): [
        region_of(layers=(7,)),
        region_of(layers=(0, 0)),
    ],
    (
        "a region with a part that is not its group's, or twice, or parts of different shapes",
        "parts",
    ): [region_of(parts=("k", "w")), region_of(parts=("k", "k")), mixed_region],
    ("an axis whose size is not what the spec says", "axes.token"): [axes_of(token=(5, 32))],
    ("other heads than the region has", "axes.head"): [axes_of(head=(1, 16))],
    ("another head size than the group has", "axes.dim"): [
        axes_of(dim=(7, 2)),
        region_of(axes=RANK.regions[0].axes[:-1]),
    ],
    ("several layers without an axis", "axes.layer"): [region_of(layers=(0, 1))],
    ("a stride of no bytes", "axes.block"): [axes_of(block=(4, 0))],
    ("heads beyond those of the group", "num_heads"): [
        region_of(first_head=1),
        tile_of(first_head=1, num_heads=2),
        tile_of(STATE, layers=(2,), parts=("norm",), num_heads=2, stop=1),
    ],
    ("a stride that steps into the axes within it", "axes.token"): [axes_of(token=(4, 24))],
    ("a region that leaves its segment", "offset_bytes"): [
        region_of(offset_bytes=1 << 20),
        rank_of(segments=(Segment("kv", NUM_BYTES - 1),)),
    ],
    (
        "a layer or part that is missing or held twice, or two regions that overlap",
        "regions",
    ): [
        rank_of(regions=RANK.regions[:1]),
        rank_of(regions=(*RANK.regions, RANK.regions[0])),
        rank_of(
            segments=(Segment("kv", 2 * NUM_BYTES),),
            regions=(*RANK.regions, replace(RANK.regions[0], offset_bytes=NUM_BYTES)),
        ),
        region_of(offset_bytes=RANK.regions[1].offset_bytes),
    ],
    ("regions of a part that differ in heads", "first_head"): [
        rank_of(regions=(RANK.regions[0], OTHER_HEAD))
    ],
    ("regions of a group that differ in blocks", "axes.block"): [
        axes_of(block=(3, RANK.regions[0].stride_bytes(AxisName.BLOCK)))
    ],
    ("a layer that is not the group's, or twice", "layers"): [
        tile_of(layers=(5,)),
        tile_of(layers=(0, 0)),
    ],
    ("a part that is not the group's, or twice, or parts whose heads differ in size", "parts"): [
        tile_of(parts=("w",)),
        tile_of(parts=("k", "k")),
        tile_of(STATE, layers=(2,), parts=("conv", "norm"), stop=1),
    ],
    ("no positions", "stop"): [tile_of(start=4), tile_of(start=5)],
}


@pytest.mark.parametrize(("what", "field"), CASES, ids=lambda text: text[:60])
def test_what_cannot_be_is_refused_by_its_field(what: str, field: str) -> None:
    for refused in CASES[what, field]:
        with pytest.raises(GeometryError) as error:
            refused()

        assert (error.value.code, error.value.detail["field"]) == (ErrorCode.GEOMETRY, field)


def test_starting_cases_pass_and_single_index_takes_any_stride() -> None:
    validate_engine(SPEC)
    validate_engine(MIXED)
    validate_rank(SPEC, RANK)
    region_of(axes=(*AXES, Axis(AxisName.LAYER, 1, 3)))()
    tile_of()()


def test_state_may_be_optional_and_share_layer_with_other_group() -> None:
    row = state_group("row", (), (StatePart("row", 1, 4),), optional=True)
    engine = replace(SPEC, groups=(*SPEC.groups, row), pp_size=2)

    validate_engine(engine)
    assert [held_layers(engine, rank) for rank in (0, 1)] == [{0}, {1}]


def k_and_v_in_one_tensor(num_blocks: int, *, v_offset: int = 32, v_step: int = 64) -> RankSpec:
    """One layer of `SPEC` whose K and V are regions of 32 bytes a block."""
    inner = (Axis(AxisName.TOKEN, 2, 16), Axis(AxisName.HEAD, 2, 8), Axis(AxisName.DIM, 4, 2))
    regions = tuple(
        Region(
            "kv", at, "full", (0,), (part,), 0, 2, (Axis(AxisName.BLOCK, num_blocks, by), *inner)
        )
        for part, at, by in ((KvPart.KEY, 0, 64), (KvPart.VALUE, v_offset, v_step))
    )
    return RankSpec(0, (Segment("kv", (num_blocks + 1) * (64 + v_step)),), regions)


MOST_BLOCKS = 2**31 - 1
ONE_LAYER = replace(SPEC, groups=(replace(SPEC.groups[0], layers=(0,)),))


@pytest.mark.parametrize("by_block", [True, False], ids=["[block, layer, 2]", "[layer, block, 2]"])
def test_large_interleaved_cache_is_compared_by_one_block(
    by_block: bool,
) -> None:
    """More spans than a few for each region are refused, so this is the bound on the work."""
    num_blocks, num_layers = 1_000_000, 100
    engine = replace(SPEC, groups=(replace(SPEC.groups[0], layers=tuple(range(num_layers))),))
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


@pytest.mark.parametrize("v_offset", [32, 64 + 32, 1000 * 64 + 32])
def test_one_byte_overlap_is_found_for_any_number_of_blocks(
    v_offset: int,
) -> None:
    validate_rank(ONE_LAYER, k_and_v_in_one_tensor(MOST_BLOCKS, v_offset=v_offset))
    for by in (-1, 1):
        with pytest.raises(GeometryError, match="two regions in segment 'kv' overlap") as refused:
            validate_rank(ONE_LAYER, k_and_v_in_one_tensor(MOST_BLOCKS, v_offset=v_offset + by))

        assert refused.value.detail["field"] == "regions"


def test_too_many_interleavings_are_refused_before_any_is_made() -> None:
    with pytest.raises(GeometryError, match="interleave in more than") as refused:
        validate_rank(ONE_LAYER, k_and_v_in_one_tensor(MOST_BLOCKS, v_step=65))

    assert refused.value.detail["field"] == "regions"


def over_each_other(**changes: object) -> RankSpec:
    """Layers 0 and 1 at the same bytes, each in a group of its own; the second one changed."""
    first, second = (
        replace(region, offset_bytes=0, group=f"g{at}") for at, region in enumerate(RANK.regions)
    )
    return replace(RANK, regions=(first, replace(second, **changes)))


def test_groups_share_bytes_only_between_blocks_of_same_number() -> None:
    groups = [replace(SPEC.groups[0], name=f"g{at}", layers=(at,)) for at in (0, 1)]
    engine = replace(SPEC, groups=tuple(groups))
    further = tuple(replace(one, stride_bytes=72) if one is AXES[0] else one for one in AXES)

    validate_rank(engine, over_each_other())
    for changes in ({"offset_bytes": 2}, {"offset_bytes": 64}, {"axes": further}):
        with pytest.raises(GeometryError) as refused:
            validate_rank(engine, over_each_other(**changes))

        assert refused.value.detail["field"] == "regions"
