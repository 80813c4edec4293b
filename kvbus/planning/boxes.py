"""Boxes of the packed path: a share cut to what a staging slot holds, and a reader's own order."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from kvbus.errors import GeometryError
from kvbus.geometry import (
    AxisName,
    Box,
    GroupSpec,
    Region,
    SlotOrder,
    num_blocks_for,
)
from kvbus.planning.mapping import Share

LONG_BLOCK_BYTES = 128 << 10
"""What a box has of one block, from which on copying more at a time is hardly faster."""


def cut_into_boxes(
    share: Share, group: GroupSpec, span: tuple[int, int], *, order: SlotOrder, box_bytes: int
) -> tuple[Box, ...]:
    """Boxes that cover ``share`` at positions ``span`` once, each of at most ``box_bytes`` in
    ``order``: as few as can be, and about equal.

    Positions are cut between blocks of ``order``, and of ``group`` too if such a block fits;
    ``group`` is either side's. Raises `GeometryError` when not even one block of ``order`` of one
    layer fits.
    """
    start, stop = span
    if stop <= start:
        return ()
    layer_bytes = share.position_bytes(group) // len(share.layers)
    _check_room(share, order, needed=order.block_size * layer_bytes, given=box_bytes)
    ways = _ways(share, group, span, order=order, held=box_bytes // layer_bytes)
    best = min(ways, key=lambda way: _cost(way, layer_bytes))
    return tuple(
        Box(
            group=share.group,
            layers=share.layers[first:last],
            parts=share.parts,
            first_head=share.first_head,
            num_heads=share.num_heads,
            start=max(start, lo * best.alignment),
            stop=min(stop, hi * best.alignment),
        )
        for first, last in _even(0, len(share.layers), best.num_layer_cuts)
        for lo, hi in _even(
            start // best.alignment, num_blocks_for(stop, best.alignment), best.num_span_cuts
        )
    )


def reader_order(reader_regions: Iterable[Region], group: GroupSpec) -> SlotOrder | None:
    """The axis order and block size of a reader's regions of ``group``, its own group.

    A box packed so has each block of the reader in one piece, as the reader has it, for each layer
    and part that lie apart there. None when its regions differ in their orders, or there are none.
    """
    regions = [region for region in reader_regions if region.group == group.name]
    if not regions:
        return None
    orders = {_stepping_axes(region) for region in regions}
    longest = max(orders, key=len)
    if any(tuple(axis for axis in longest if axis in order) != order for order in orders):
        return None
    apart = [axis for axis in (AxisName.LAYER, AxisName.KV, *AxisName) if axis not in longest]
    return SlotOrder((*dict.fromkeys(apart), *longest), group.block_size)


class _Way(NamedTuple):
    """A way to cut: layers and span into so many parts each, between multiples of a number."""

    layers_together: int
    num_layer_cuts: int
    alignment: int
    num_span_cuts: int


def _ways(
    share: Share, group: GroupSpec, span: tuple[int, int], *, order: SlotOrder, held: int
) -> Iterator[_Way]:
    """One for each number of layers together, when a box has room for ``held`` positions of one."""
    for together in range(1, min(len(share.layers), held // order.block_size) + 1):
        most = held // together
        whole = lcm(group.block_size, order.block_size)
        alignment = whole if whole <= most else order.block_size
        num_span_cuts = 1
        if _touched(span, order.block_size) * order.block_size > most:
            num_span_cuts = -(-_touched(span, alignment) // (most // alignment))
        yield _Way(together, -(-len(share.layers) // together), alignment, num_span_cuts)


def _cost(way: _Way, layer_bytes: int) -> tuple[int, bool, int]:
    """Fewest boxes first, then long blocks, then few layers, as each may be a copy of its own."""
    block_bytes = way.layers_together * way.alignment * layer_bytes
    is_short = block_bytes < LONG_BLOCK_BYTES
    return (
        way.num_layer_cuts * way.num_span_cuts,
        is_short,
        -block_bytes if is_short else block_bytes,
    )


def _stepping_axes(region: Region) -> tuple[AxisName, ...]:
    """Axes with more than one index, outermost first."""
    stepping = [axis for axis in region.axes if axis.size > 1]
    stepping.sort(key=lambda axis: axis.stride_bytes, reverse=True)
    return tuple(axis.name for axis in stepping)


def _check_room(share: Share, order: SlotOrder, *, needed: int, given: int) -> None:
    if needed <= given:
        return
    least = "one token" if order.block_size == 1 else f"one block of {order.block_size} tokens"
    raise GeometryError(
        f"{least} of one layer of group '{share.group}' takes {needed} bytes of a staging slot, "
        f"which has {given}: raise slot_bytes to {needed} or more on both agents, and "
        "staging_bytes with it",
        field="slot_bytes",
        needed_bytes=needed,
        given_bytes=given,
    )


def _touched(span: tuple[int, int], block_size: int) -> int:
    return num_blocks_for(span[1], block_size) - span[0] // block_size


def _even(start: int, stop: int, num: int) -> Iterator[tuple[int, int]]:
    """[start, stop) in ``num`` intervals as equal as can be."""
    return pairwise(start + index * (stop - start) // num for index in range(num + 1))
