"""Descriptions, pairs of engines and boxes that cannot be are refused, by their field."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kvbus.errors import ErrorCode, GeometryError
from kvbus.geometry import (
    Axis,
    AxisName,
    Box,
    EngineSpec,
    GroupSpec,
    KvLayout,
    StatePart,
    lay_out_rank,
    slot_region,
    state_group,
    validate_engine,
    validate_rank,
    validate_ranks,
)
from kvbus.planning import ReadMap, check_compatible, cut_into_boxes

FULL = GroupSpec("full", (0, 1), 4, 2, 8, "float16")
SPEC = EngineSpec("e", "m", 1, (FULL,))
RANK = lay_out_rank(SPEC, 0, KvLayout.parse("NHD"), num_blocks=4)
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


def other(**changes: Any) -> Refused:
    theirs = replace(SPEC, engine_id="d", groups=(replace(FULL, **changes),))
    return lambda: check_compatible(SPEC, theirs)


def box_of(group: GroupSpec = FULL, **changes: Any) -> Refused:
    box = replace(Box("full", (0,), ("k",), 0, 1, 0, 4), **changes)
    return lambda: slot_region(group, box)


def small_slot() -> None:
    share = ReadMap([RANK], [RANK]).shares()[0]
    cut_into_boxes(share, FULL, (0, 4), box_bytes=8)


def unheld_head() -> None:
    tp2 = replace(SPEC, tp_size=2)
    ranks = [lay_out_rank(tp2, 0, KvLayout.parse("NHD"), num_blocks=4)] * 2
    validate_ranks(tp2, [ranks[0], replace(ranks[1], rank=1)])


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
    ("heads beyond those of the group", "num_heads"): [
        region_of(first_head=1),
        box_of(first_head=1, num_heads=2),
        box_of(STATE, layers=(2,), parts=("norm",), num_heads=2, stop=1),
    ],
    ("a stride that steps into the axes within it", "axes.token"): [axes_of(token=(4, 24))],
    ("a region that leaves its segment", "offset_bytes"): [region_of(offset_bytes=1 << 20)],
    (
        "a layer or part that is missing or held twice, or two regions that overlap",
        "regions",
    ): [
        rank_of(regions=RANK.regions[:1]),
        rank_of(regions=(*RANK.regions, RANK.regions[0])),
        region_of(offset_bytes=RANK.regions[1].offset_bytes),
    ],
    ("regions of a part that differ in heads", "first_head"): [
        rank_of(regions=(RANK.regions[0], OTHER_HEAD))
    ],
    ("regions of a group that differ in blocks", "axes.block"): [
        axes_of(block=(3, RANK.regions[0].stride_bytes(AxisName.BLOCK)))
    ],
    ("a head that no rank holds, when all ranks are known", "ranks"): [unheld_head],
    ("different models", "model"): [lambda: check_compatible(SPEC, replace(SPEC, model="n"))],
    ("a group that only one side has", "groups"): [lambda: check_compatible(SPEC, MIXED)],
    ("different layers of a group", "full.layers"): [other(layers=(0, 2))],
    ("different dtypes", "full.dtype"): [other(dtype="bfloat16")],
    ("different numbers of KV heads", "full.num_kv_heads"): [other(num_kv_heads=4)],
    ("different head sizes", "full.head_dim"): [other(head_dim=16)],
    ("different parts", "full.parts"): [other(parts=("latent",))],
    ("different windows", "full.window"): [other(window=8)],
    ("different states", "full.state"): [other(state=STATE.state)],
    ("a layer that is not the group's, or twice", "layers"): [
        box_of(layers=(5,)),
        box_of(layers=(0, 0)),
    ],
    ("a part that is not the group's, or twice, or parts whose heads differ in size", "parts"): [
        box_of(parts=("w",)),
        box_of(parts=("k", "k")),
        box_of(STATE, layers=(2,), parts=("conv", "norm"), stop=1),
    ],
    ("no positions", "stop"): [box_of(start=4), box_of(start=5)],
    ("a slot that is too small for one token of one layer", "slot_bytes"): [small_slot],
}
PAIRS = {what for what, _ in CASES if what.startswith("different") or "only one side" in what}


@pytest.mark.parametrize(("what", "field"), CASES, ids=lambda text: text[:60])
def test_what_cannot_be_is_refused_by_its_field(what: str, field: str) -> None:
    code = ErrorCode.INCOMPATIBLE if what in PAIRS else ErrorCode.GEOMETRY

    for refused in CASES[what, field]:
        with pytest.raises(GeometryError) as error:
            refused()

        assert (error.value.code, error.value.detail["field"]) == (code, field)


def test_what_the_cases_start_from_is_not_refused() -> None:
    validate_engine(SPEC)
    validate_engine(MIXED)
    validate_rank(SPEC, RANK)
    validate_ranks(SPEC, [RANK])
    check_compatible(SPEC, SPEC)
    box_of()()
