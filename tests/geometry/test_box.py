"""A box lies in its slot in canonical order: each element where index arithmetic puts it."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    Box,
    GroupSpec,
    slot_bytes,
    slot_region,
)
from tests.examples import num_examples
from tests.geometry.layouts import Element, byte_offset


@st.composite
def boxes(draw: st.DrawFn) -> tuple[GroupSpec, Box]:
    """A group, and a box of it."""
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
    return group, box


@settings(max_examples=num_examples(200), deadline=None)
@given(boxes())
def test_every_element_lies_where_counting_the_axes_puts_it(
    case: tuple[GroupSpec, Box],
) -> None:
    group, box = case
    itemsize = DTYPE_SIZES_BYTES[group.dtype]
    sizes = (
        len(box.layers),
        len(box.parts),
        box.stop - box.start,
        box.num_heads,
        group.head_dim,
    )

    region = slot_region(group, box)

    for index in product(*map(range, sizes)):
        layer, part, token, head, dim = index
        named = (box.layers[layer], box.parts[part], token, box.first_head + head, dim)
        counted = int(np.ravel_multi_index(index, sizes))
        assert byte_offset(region, Element(0, *named)) == itemsize * counted
    assert slot_bytes(group, box) == np.prod(sizes) * itemsize
