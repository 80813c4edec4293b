"""Boxes: what one packed transfer carries, and how it lies in a staging slot.

A slot's content is a region at offset 0 of one block, without gaps, in the canonical order
``[layer, kv, token, head, dim]``.
"""

from typing import Annotated

import msgspec

from kvbus.errors import GeometryError
from kvbus.geometry.layouts import packed_region
from kvbus.geometry.spec import (
    DTYPE_SIZES_BYTES,
    AxisName,
    Count,
    GroupSpec,
    Index,
    Name,
    Region,
)

CANONICAL_AXES = (
    AxisName.LAYER,
    AxisName.KV,
    AxisName.BLOCK,
    AxisName.TOKEN,
    AxisName.HEAD,
    AxisName.DIM,
)


class Box(msgspec.Struct, frozen=True):
    """Layers x parts x positions [``start``, ``stop``) x heads of one group; see
    [Packed reads](#packed-reads). Positions are those of the group's block table; for all but a
    state these are tokens.
    """

    group: Name
    """The group."""
    layers: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=4096)]
    """Layers of the group, none twice; the order is that along the layer axis."""
    parts: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=64)]
    """Parts of the group with heads of one size, none twice; the order is that along the kv
    axis."""
    first_head: Index
    """First global KV head, or unit."""
    num_heads: Count
    """Number of heads, or units."""
    start: Index
    """First position of the block table."""
    stop: Index
    """One past the last position; over ``start``."""


def slot_region(group: GroupSpec, box: Box) -> Region:
    """Where each element of ``box`` lies in its slot: all of its positions are in block 0.

    ``group`` is either side's. Raises `GeometryError` for a box that is none of the group.
    """
    _check(group, box)
    return packed_region(
        group,
        CANONICAL_AXES,
        box.layers,
        box.parts,
        range(box.first_head, box.first_head + box.num_heads),
        num_blocks=1,
        block_size=box.stop - box.start,
        segment_id="slot",
    )


def slot_bytes(group: GroupSpec, box: Box) -> int:
    """Bytes of the slot that `slot_region` describes."""
    shape = group.part_shape(box.parts[0])
    heads = len(box.layers) * len(box.parts) * box.num_heads
    return (box.stop - box.start) * heads * shape.head_dim * DTYPE_SIZES_BYTES[group.dtype]


def _check(group: GroupSpec, box: Box) -> None:
    if not (set(box.layers) <= set(group.layers) and set(box.parts) <= set(group.parts)):
        raise GeometryError(
            f"box has layers or parts that group '{group.name}' has not", field="layers"
        )
    if len(set(box.layers)) != len(box.layers) or len(set(box.parts)) != len(box.parts):
        raise GeometryError("box names a layer or a part twice", field="layers")
    shapes = [group.part_shape(part) for part in box.parts]
    if len({shape.head_dim for shape in shapes}) != 1:
        raise GeometryError(
            "parts whose heads differ in size need boxes of their own", field="parts"
        )
    num_heads = min(shape.num_heads for shape in shapes)
    if box.first_head + box.num_heads > num_heads:
        raise GeometryError(
            f"box has heads {box.first_head} to {box.first_head + box.num_heads} of {num_heads}",
            field="num_heads",
        )
    if box.stop <= box.start:
        raise GeometryError(f"box has no positions: {box.start} to {box.stop}", field="stop")
