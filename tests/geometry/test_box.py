"""A box lies in its slot as its order says: every element where plain index arithmetic puts it."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    AxisName,
    Box,
    GroupSpec,
    SlotOrder,
    canonical_order,
    slot_bytes,
    slot_region,
    slot_table,
)
from tests.examples import num_examples
from tests.geometry.layouts import Element, byte_offset

AXES = (
    AxisName.BLOCK,
    AxisName.LAYER,
    AxisName.KV,
    AxisName.TOKEN,
    AxisName.HEAD,
    AxisName.DIM,
)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[GroupSpec, Box, SlotOrder]:
    """A group, a box of it and any order of any block size."""
    heads, dims = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    group = GroupSpec("full", (0, 2, 3), 4, heads, dims, "float16")
    first, start = draw(st.integers(0, heads - 1)), draw(st.integers(0, 12))
    box = Box(
        group="full",
        layers=tuple(draw(st.permutations(group.layers)))[: draw(st.integers(1, 3))],
        parts=tuple(draw(st.permutations(group.parts)))[: draw(st.integers(1, 2))],
        first_head=first,
        num_heads=draw(st.integers(1, heads - first)),
        start=start,
        stop=start + draw(st.integers(1, 12)),
    )
    axes = tuple(draw(st.permutations(list(AxisName))))
    return group, box, SlotOrder(axes, draw(st.integers(1, 7)))


@settings(max_examples=num_examples(200), deadline=None)
@given(boxes())
def test_every_element_lies_where_counting_the_axes_puts_it(
    case: tuple[GroupSpec, Box, SlotOrder],
) -> None:
    group, box, order = case
    itemsize, first_block = DTYPE_SIZES_BYTES[group.dtype], box.start // order.block_size
    num_blocks = (box.stop - 1) // order.block_size - first_block + 1
    of_box = (num_blocks, len(box.layers), len(box.parts))
    sizes = dict(zip(AXES, (*of_box, order.block_size, box.num_heads, group.head_dim), strict=True))

    region, table = slot_region(group, box, order), slot_table(box, order)

    held = [
        range(box.start, box.stop),
        range(len(box.layers)),
        range(len(box.parts)),
        range(box.num_heads),
        range(group.head_dim),
    ]
    elements = list(product(*held))
    for position, layer, part, head, dim in elements:
        block, token = divmod(position, order.block_size)
        where = dict(zip(AXES, (block - first_block, layer, part, token, head, dim), strict=True))
        counted = np.ravel_multi_index(
            [where[name] for name in order.axes], [sizes[name] for name in order.axes]
        )
        named = (box.layers[layer], box.parts[part], token, box.first_head + head, dim)
        assert byte_offset(region, Element(table.block(block), *named)) == itemsize * counted
    assert slot_bytes(group, box, order) == np.prod(list(sizes.values())) * itemsize
    assert slot_bytes(group, box, canonical_order()) == len(elements) * itemsize
