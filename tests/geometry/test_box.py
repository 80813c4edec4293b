"""A box lies in its slot as its order says: every element where plain index arithmetic puts it."""

from itertools import product
from math import prod

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    AxisName,
    Box,
    GroupSpec,
    KvPart,
    SlotOrder,
    StatePart,
    canonical_order,
    slot_bytes,
    slot_region,
    slot_table,
    state_group,
)
from tests.examples import num_examples
from tests.geometry.layouts import Element, byte_offset

replace = msgspec.structs.replace
GROUP = GroupSpec("full", (3, 5, 9), 4, 6, 2, "float16")
BOX = Box("full", (9, 3), (KvPart.VALUE, KvPart.KEY), 1, 3, 5, 11)
STATE = state_group(
    "mamba", (0, 1), (StatePart("conv", 2, 6), StatePart("ssm", 4, 8), StatePart("skip", 6, 8))
)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[GroupSpec, Box, SlotOrder]:
    """A group, a box of it and any order of any block size."""
    group = GroupSpec(
        "full", (0, 2, 3), 4, draw(st.integers(1, 4)), draw(st.integers(1, 3)), "float16"
    )
    first = draw(st.integers(0, group.num_kv_heads - 1))
    start = draw(st.integers(0, 12))
    box = Box(
        group="full",
        layers=tuple(draw(st.permutations(group.layers)))[: draw(st.integers(1, 3))],
        parts=tuple(draw(st.permutations(group.parts)))[: draw(st.integers(1, 2))],
        first_head=first,
        num_heads=draw(st.integers(1, group.num_kv_heads - first)),
        start=start,
        stop=start + draw(st.integers(1, 12)),
    )
    axes = tuple(draw(st.permutations(list(AxisName))))
    return group, box, SlotOrder(axes, draw(st.integers(1, 7)))


def index_of(box: Box, group: GroupSpec, order: SlotOrder, where: dict[AxisName, int]) -> int:
    """The place of an element among all elements of the slot, counted axis by axis."""
    touched = {position // order.block_size for position in range(box.start, box.stop)}
    sizes = {
        AxisName.BLOCK: len(touched),
        AxisName.LAYER: len(box.layers),
        AxisName.KV: len(box.parts),
        AxisName.TOKEN: order.block_size,
        AxisName.HEAD: box.num_heads,
        AxisName.DIM: group.head_dim,
    }
    index = 0
    for name in order.axes:
        index = index * sizes[name] + where[name]
    return index


@settings(max_examples=num_examples(200), deadline=None)
@given(boxes())
def test_every_element_lies_where_counting_the_axes_puts_it(
    case: tuple[GroupSpec, Box, SlotOrder],
) -> None:
    group, box, order = case
    itemsize = DTYPE_SIZES_BYTES[group.dtype]
    region, table = slot_region(group, box, order), slot_table(box, order)
    used = set()

    for position, layer, part, head, dim in product(
        range(box.start, box.stop),
        box.layers,
        box.parts,
        range(box.first_head, box.first_head + box.num_heads),
        range(group.head_dim),
    ):
        block = int(table.array()[position // order.block_size - table.first_block])
        token = position % order.block_size
        at = byte_offset(region, Element(block, layer, part, token, head, dim))
        where = {
            AxisName.BLOCK: position // order.block_size - box.start // order.block_size,
            AxisName.LAYER: box.layers.index(layer),
            AxisName.KV: box.parts.index(part),
            AxisName.TOKEN: token,
            AxisName.HEAD: head - box.first_head,
            AxisName.DIM: dim,
        }
        assert at == itemsize * index_of(box, group, order, where)
        used.add(at)

    num_elements = (
        (box.stop - box.start) * len(box.layers) * len(box.parts) * box.num_heads * group.head_dim
    )
    assert len(used) == num_elements
    assert max(used) + itemsize <= slot_bytes(group, box, order)


@given(boxes())
def test_a_slot_has_as_many_bytes_as_its_region(case: tuple[GroupSpec, Box, SlotOrder]) -> None:
    group, box, order = case

    region = slot_region(group, box, order)

    sizes = prod(axis.size for axis in region.axes)
    assert slot_bytes(group, box, order) == sizes * DTYPE_SIZES_BYTES[group.dtype]


@given(boxes())
def test_a_slot_in_canonical_order_has_no_more_bytes_than_the_box(
    case: tuple[GroupSpec, Box, SlotOrder],
) -> None:
    group, box, _ = case

    num_bytes = slot_bytes(group, box, canonical_order())

    heads = len(box.layers) * len(box.parts) * box.num_heads
    assert num_bytes == (box.stop - box.start) * heads * group.head_dim * 2


def test_a_box_of_a_state_has_units_for_heads_and_bytes_for_dims() -> None:
    box = Box("mamba", (0, 1), ("ssm", "skip"), 1, 3, 0, 1)

    region = slot_region(STATE, box, canonical_order())

    assert (region.first_head, region.num_heads) == (1, 3)
    assert region.size(AxisName.DIM) == 8
    assert slot_bytes(STATE, box, canonical_order()) == 2 * 2 * 3 * 8


REFUSALS: dict[str, tuple[str, GroupSpec, Box]] = {
    "layer_of_no_group": ("layers", GROUP, replace(BOX, layers=(3, 4))),
    "layer_twice": ("layers", GROUP, replace(BOX, layers=(3, 3))),
    "part_of_no_group": ("layers", GROUP, replace(BOX, parts=("latent",))),
    "part_twice": ("layers", GROUP, replace(BOX, parts=("k", "k"))),
    "heads_past_the_last": ("num_heads", GROUP, replace(BOX, first_head=4)),
    "no_position": ("stop", GROUP, replace(BOX, stop=5)),
    "stops_before_it_starts": ("stop", GROUP, replace(BOX, stop=4)),
    "parts_of_different_sizes": ("parts", STATE, Box("mamba", (0,), ("conv", "ssm"), 0, 1, 0, 1)),
    "units_past_the_last_of_one_part": (
        "num_heads",
        STATE,
        Box("mamba", (0,), ("skip", "ssm"), 0, 5, 0, 1),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_box_that_is_none_of_the_group_is_refused_by_the_field_that_is_wrong(case: str) -> None:
    field, group, box = REFUSALS[case]

    with pytest.raises(GeometryError) as refused:
        slot_region(group, box, canonical_order())

    assert refused.value.detail["field"] == field


@pytest.mark.parametrize(
    "axes",
    [tuple(AxisName)[1:], (*AxisName, AxisName.DIM), (AxisName.DIM, *tuple(AxisName)[1:])],
    ids=["one_missing", "one_too_many", "one_twice_instead_of_another"],
)
def test_an_order_that_does_not_name_each_axis_once_is_refused(axes: tuple[AxisName, ...]) -> None:
    with pytest.raises(GeometryError) as refused:
        slot_region(GROUP, BOX, SlotOrder(axes, 1))

    assert refused.value.detail["field"] == "axes"
