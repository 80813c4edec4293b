"""Boxes: what one packed transfer carries, and how it lies in a staging slot.

A slot's content is a region at offset 0, of as many blocks as it takes.
"""

from typing import Annotated

import msgspec

from kvbus.errors import GeometryError
from kvbus.geometry.blocks import BlockTable, num_blocks_for
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


class SlotOrder(msgspec.Struct, frozen=True):
    """How a box lies in a staging slot, without gaps; see [Packed reads](#packed-reads). In the
    canonical order, layer, kv, block, token, head, dim, blocks have one position. With a reader's
    order and block size each of its blocks lies in one piece, as it will in the reader's memory.
    """

    axes: Annotated[tuple[AxisName, ...], msgspec.Meta(min_length=6, max_length=6)]
    """All six axes, outermost first."""
    block_size: Count
    """Positions in a block of the slot: 1 in the canonical order."""


def canonical_order() -> SlotOrder:
    """``[layer, kv, token, head, dim]``: what either side can make and take."""
    return SlotOrder(CANONICAL_AXES, 1)


def slot_region(group: GroupSpec, box: Box, order: SlotOrder) -> Region:
    """Where each element of ``box`` lies in its slot; its blocks are those of `slot_table`.

    ``group`` is either side's. Raises `GeometryError` for a box that is none of the group, or an
    order that lacks an axis.
    """
    _check(group, box, order)
    return packed_region(
        group,
        order.axes,
        box.layers,
        box.parts,
        range(box.first_head, box.first_head + box.num_heads),
        num_blocks=_num_blocks(box, order),
        block_size=order.block_size,
        segment_id="slot",
    )


def slot_table(box: Box, order: SlotOrder) -> BlockTable:
    """The slot's blocks, in order: as many as the box's positions touch."""
    first = box.start // order.block_size
    return BlockTable.of(range(_num_blocks(box, order)), first_block=first)


def slot_bytes(group: GroupSpec, box: Box, order: SlotOrder) -> int:
    """Bytes of the slot that `slot_region` describes, parts of blocks outside the box included."""
    shape = group.part_shape(box.parts[0])
    positions = _num_blocks(box, order) * order.block_size
    heads = len(box.layers) * len(box.parts) * box.num_heads
    return positions * heads * shape.head_dim * DTYPE_SIZES_BYTES[group.dtype]


def _num_blocks(box: Box, order: SlotOrder) -> int:
    return num_blocks_for(box.stop, order.block_size) - box.start // order.block_size


def _check(group: GroupSpec, box: Box, order: SlotOrder) -> None:
    if sorted(order.axes) != sorted(AxisName):
        raise GeometryError("a slot's order names each of the six axes once", field="axes")
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
