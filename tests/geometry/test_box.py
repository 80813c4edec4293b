"""A box lies in its slot as its order says: every element where plain index arithmetic puts it."""

from itertools import product
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    AxisName,
    Box,
    GroupSpec,
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
    assert slot_bytes(group, box, order) == prod(axis.size for axis in region.axes) * itemsize
    assert slot_bytes(group, box, canonical_order()) == num_elements * itemsize


def test_a_box_of_a_state_has_units_for_heads_and_bytes_for_dims() -> None:
    box = Box("mamba", (0, 1), ("ssm", "skip"), 1, 3, 0, 1)

    region = slot_region(STATE, box, canonical_order())

    assert (region.first_head, region.num_heads) == (1, 3)
    assert region.size(AxisName.DIM) == 8
    assert slot_bytes(STATE, box, canonical_order()) == 2 * 2 * 3 * 8
