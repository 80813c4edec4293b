"""The page on geometry: its example is true, and what it says is refused is, by that field."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvbus.errors import GeometryError
from kvbus.geometry import (
    Axis,
    AxisName,
    BlockTable,
    Box,
    EngineSpec,
    GroupSpec,
    KvLayout,
    Region,
    SlotOrder,
    StatePart,
    canonical_order,
    lay_out_rank,
    slot_bytes,
    slot_region,
    state_group,
    validate_engine,
    validate_rank,
    validate_ranks,
)
from kvbus.planning import (
    DirectPlan,
    PlacedRank,
    ReadMap,
    check_compatible,
    cut_into_boxes,
    reader_order,
    whole_spans,
)

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "geometry.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| `(geometry|incompatible)` \| `([^|]+)` \|$", TEXT, re.M)

FULL = GroupSpec("full", (0, 1), 4, 2, 8, "float16")
SPEC = EngineSpec("e", "m", 1, (FULL,))
RANK = lay_out_rank(SPEC, 0, KvLayout.parse("NHD"), num_blocks=4)
STATE = state_group("state", (2,), (StatePart("conv", 4, 6), StatePart("norm", 1, 3)))
MIXED = EngineSpec("e", "m", 1, (FULL, STATE))


def example() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - our own page
    return names


def test_the_strides_of_the_example_are_those_of_its_ranks() -> None:
    names = example()
    table = re.findall(r"^\| (\w+ \d) \| ([\d, ]+) \| ([\w, ]+) \| ([\d, ]+) \|$", TEXT, re.M)

    for (side, heads, axes, strides), rank in zip(
        table, [*names["theirs"], *names["ours"]], strict=True
    ):
        (region,) = rank.regions
        assert side.endswith(str(rank.rank))
        assert [int(head) for head in heads.split(", ")] == list(
            range(region.first_head, region.first_head + region.num_heads)
        )
        assert axes == ", ".join(f"{axis.name} {axis.size}" for axis in region.axes)
        assert strides == ", ".join(str(axis.stride_bytes) for axis in region.axes)


def test_the_reads_of_the_example_are_as_many_as_the_page_says() -> None:
    names = example()
    theirs = {
        r.rank: PlacedRank(names["prefill"], r, {"kv": 4096 * r.rank}) for r in names["theirs"]
    }
    ours = {0: PlacedRank(names["decode"], names["ours"][0], {"kv": 1 << 20})}
    shares = ReadMap(names["theirs"], names["ours"]).shares()
    spans = whole_spans(names["decode"].groups, names["prefill"].groups, 0, 5)
    tables = {"full": BlockTable.of([3, 0, 2])}, {"full": BlockTable.of([1, 0])}

    direct = DirectPlan(theirs, ours, shares).descriptors(*tables, spans)

    table = dict(
        re.findall(r"^\| (direct|packed|reordered) \| (\d+ \| \d+ \| \d+) \|$", TEXT, re.M)
    )
    assert table["direct"] == f"0 | {len(direct.local)} | 0"
    assert direct.num_bytes == 80
    piece = (4096 + 0, (1 << 20) + 88)  # positions 2 and 3: slots 0 and 1 there, 2 and 3 here
    assert piece in zip(direct.remote[:, 0].tolist(), direct.local[:, 0].tolist(), strict=True)
    group, order = names["decode"].group("full"), reader_order(names["ours"][0].regions, FULL)
    assert order is not None
    sizes = {}
    for kind in (canonical_order(), order):
        boxes = [
            box
            for share in shares
            for box in cut_into_boxes(share, group, spans["full"], order=kind, box_bytes=1 << 20)
        ]
        sizes[kind.block_size] = [slot_bytes(group, box, kind) for box in boxes]
    assert table["packed"] == f"{sum(sizes[1])} | {len(sizes[1])} | {sum(sizes[1])}"
    assert sizes == {1: [40, 40], 4: [64, 64]}
    assert ", ".join(order.axes) in TEXT


def test_the_reordered_reads_of_the_example_are_those_of_the_slots_runs() -> None:
    names = example()
    group = names["decode"].group("full")
    order = SlotOrder(
        tuple(map(AxisName, ("layer", "block", "kv", "head", "token", "dim"))), group.block_size
    )
    runs = []
    for share in ReadMap(names["theirs"], names["ours"]).shares():
        (box,) = cut_into_boxes(share, group, (0, 5), order=order, box_bytes=1 << 20)
        slot = slot_region(group, box, order)
        for first, stop in ((0, 4), (4, 5)):  # by block of the reader; a head's K and V lie apart
            runs += [(stop - first) * slot.stride_bytes(AxisName.TOKEN)] * len(box.parts)

    assert f"| reordered | 80 | {len(runs)} | 0 |" in TEXT
    assert sum(runs) == 80


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


def box_of(group: GroupSpec = FULL, order: SlotOrder | None = None, **changes: Any) -> Refused:
    box = replace(Box("full", (0,), ("k",), 0, 1, 0, 4), **changes)
    return lambda: slot_region(group, box, order or canonical_order())


def small_slot() -> None:
    share = ReadMap([RANK], [RANK]).shares()[0]
    cut_into_boxes(share, FULL, (0, 4), order=canonical_order(), box_bytes=8)


def unheld_head() -> None:
    tp2 = replace(SPEC, tp_size=2)
    ranks = [lay_out_rank(tp2, 0, KvLayout.parse("NHD"), num_blocks=4)] * 2
    validate_ranks(tp2, [ranks[0], replace(ranks[1], rank=1)])


LONGER: Region = replace(RANK.regions[1], first_head=1, num_heads=1)
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
    ("a region with a layer that is not its group's", "layers"): [region_of(layers=(7,))],
    (
        "a region with a part that is not its group's, or with parts of different shapes",
        "parts",
    ): [region_of(parts=("k", "w")), mixed_region],
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
        rank_of(
            regions=(
                RANK.regions[0],
                replace(
                    LONGER,
                    axes=tuple(axis for axis in LONGER.axes if axis.name is not AxisName.HEAD),
                ),
            )
        )
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
    ("an order that does not name each axis once", "axes"): [
        box_of(order=SlotOrder(axes, 1))
        for axes in ((AxisName.DIM,) * 6, tuple(AxisName)[1:], (*AxisName, AxisName.DIM))
    ],
    ("layers or parts that are not the group's", "layers"): [
        box_of(layers=(5,)),
        box_of(parts=("w",)),
    ],
    ("a layer or a part twice", "layers"): [box_of(layers=(0, 0)), box_of(parts=("k", "k"))],
    ("parts whose heads, or units, differ in size", "parts"): [
        box_of(STATE, layers=(2,), parts=("conv", "norm"), stop=1)
    ],
    ("no positions", "stop"): [box_of(start=4), box_of(start=5)],
    ("a slot that is too small for one token of one layer", "slot_bytes"): [small_slot],
}
ELSEWHERE = {("a rank at two agents, none at the home, or a number too high", "others")}


def test_every_refusal_on_the_page_has_a_case_and_every_case_is_on_the_page() -> None:
    assert {(what, field) for what, _, field in ROWS} == CASES.keys() | ELSEWHERE


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[2]}-{row[0]}"[:60])
def test_what_the_page_says_is_refused_is_refused_by_that_field(row: tuple[str, str, str]) -> None:
    what, code, field = row

    for refused in CASES.get((what, field), []):
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
