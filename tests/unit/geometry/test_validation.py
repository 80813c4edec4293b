"""Descriptions of engines, ranks and tiles that cannot be are refused, by their field.

Pairs of engines that do not fit: see `tests/unit/planning/test_compatibility.py`.
"""

from collections.abc import Callable
from itertools import product
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


def state_with(**changes: Any) -> Refused:
    return engine_of(FULL, replace(STATE, **changes))


def rank_of(**changes: Any) -> Refused:
    return lambda: validate_rank(SPEC, replace(RANK, **changes))


def region_of(**changes: Any) -> Refused:
    return rank_of(regions=(replace(RANK.regions[0], **changes), *RANK.regions[1:]))


def axes_of(**changes: tuple[int, int]) -> Refused:
    sizes = {axis.name.value: (axis.size, axis.stride_bytes) for axis in AXES} | changes
    return region_of(axes=tuple(Axis(AxisName(name), *one) for name, one in sizes.items()))


def mixed_region() -> None:
    rank = lay_out_rank(MIXED, 0, KvLayout.parse("NHD"), num_blocks=2)
    together = replace(rank.regions[-1], parts=("conv", "norm"))
    validate_rank(MIXED, replace(rank, regions=(*rank.regions[:-2], together)))


def tile_of(group: GroupSpec = FULL, **changes: Any) -> Refused:
    tile = replace(Tile("full", (0,), ("k",), 0, 1, 0, 4), **changes)
    return lambda: slot_region(group, tile)


HEADLESS = tuple(axis for axis in AXES if axis.name is not AxisName.HEAD)
OTHER_HEAD = replace(RANK.regions[1], first_head=1, num_heads=1, axes=HEADLESS)
LEAVING = rank_of(segments=(Segment("kv", NUM_BYTES - 1),))
FURTHER = replace(RANK.regions[0], offset_bytes=NUM_BYTES)
TWICE: dict[str, Any] = {
    "segments": (Segment("kv", 2 * NUM_BYTES),),
    "regions": (*RANK.regions, FURTHER),
}
CONV: dict[str, Any] = {"layers": (2,), "num_heads": 2, "stop": 1}
REFUSED: dict[str, list[Refused]] = {
    "groups": [engine_of(FULL, replace(FULL, layers=(2,)))],
    "layers": [
        engine_of(FULL, replace(FULL, name="b")),
        engine_of(replace(FULL, layers=(0, 0))),
        *(make(layers=layers) for make, layers in product((region_of, tile_of), ((7,), (0, 0)))),
    ],
    "dtype": [engine_of(replace(FULL, dtype="int3"))],
    "state": [
        *(state_with(**one) for one in ({"window": 3}, {"block_size": 2}, {"dtype": "float16"})),
        *(state_with(parts=parts) for parts in (("conv",), ("norm", "conv"), ("conv", "other"))),
    ],
    "rank": [rank_of(rank=1)],
    "segments": [rank_of(segments=RANK.segments * 2)],
    "group": [region_of(group="none")],
    "segment_id": [region_of(segment_id="none")],
    "axes": [region_of(axes=AXES[:1] * 2)],
    "parts": [
        engine_of(replace(FULL, parts=("k", "k"))),
        *(region_of(parts=parts) for parts in (("k", "w"), ("k", "k"))),
        *(tile_of(parts=parts) for parts in (("w",), ("k", "k"))),
        *(mixed_region, tile_of(STATE, layers=(2,), parts=("conv", "norm"), stop=1)),
    ],
    "axes.token": [axes_of(token=(5, 32)), axes_of(token=(4, 24))],
    "axes.head": [axes_of(head=(1, 16))],
    "axes.dim": [axes_of(dim=(7, 2)), region_of(axes=AXES[:-1])],
    "axes.layer": [region_of(layers=(0, 1))],
    "axes.block": [axes_of(block=(4, 0)), axes_of(block=(3, 64))],
    "num_heads": [
        region_of(first_head=1),
        tile_of(first_head=1, num_heads=2),
        tile_of(STATE, parts=("norm",), **CONV),
    ],
    "offset_bytes": [region_of(offset_bytes=1 << 20), LEAVING],
    "regions": [
        *(rank_of(regions=some) for some in (RANK.regions[:1], (*RANK.regions, RANK.regions[0]))),
        *(rank_of(**TWICE), region_of(offset_bytes=RANK.regions[1].offset_bytes)),
    ],
    "first_head": [rank_of(regions=(RANK.regions[0], OTHER_HEAD))],
    "stop": [tile_of(start=4), tile_of(start=5)],
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_is_refused_by_its_field(field: str) -> None:
    for check in REFUSED[field]:
        with pytest.raises(GeometryError) as refused:
            check()
        assert (refused.value.code, refused.value.detail["field"]) == (ErrorCode.GEOMETRY, field)


def test_starting_cases_pass_and_single_index_takes_any_stride() -> None:
    for engine in (SPEC, MIXED):
        validate_engine(engine)
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
def test_large_interleaved_cache_is_compared_by_one_block(by_block: bool) -> None:
    """Refusing many spans for each region bounds the work."""
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
def test_one_byte_overlap_is_found_for_any_number_of_blocks(v_offset: int) -> None:
    validate_rank(ONE_LAYER, k_and_v_in_one_tensor(MOST_BLOCKS, v_offset=v_offset))
    for by in (-1, 1):
        with pytest.raises(GeometryError, match="two regions in segment 'kv' overlap"):
            validate_rank(ONE_LAYER, k_and_v_in_one_tensor(MOST_BLOCKS, v_offset=v_offset + by))


def test_too_many_interleavings_are_refused_before_any_is_made() -> None:
    with pytest.raises(GeometryError, match="interleave in more than"):
        validate_rank(ONE_LAYER, k_and_v_in_one_tensor(MOST_BLOCKS, v_step=65))


def over_each_other(**changes: object) -> RankSpec:
    """Layers 0 and 1 at the same bytes, in two groups; the second layer is changed."""
    same = [replace(one, offset_bytes=0, group=f"g{at}") for at, one in enumerate(RANK.regions)]
    first, second = same
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
