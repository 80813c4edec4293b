"""Boxes of the packed path: a share cut to what a staging slot holds."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from kvbus.errors import GeometryError
from kvbus.geometry import Box, GroupSpec, num_blocks_for
from kvbus.planning.mapping import Share

LONG_BLOCK_BYTES = 128 << 10
"""What a box has of one block, from which on copying more at a time is hardly faster."""


def cut_into_boxes(
    share: Share, group: GroupSpec, span: tuple[int, int], *, box_bytes: int
) -> tuple[Box, ...]:
    """Boxes that cover ``share`` at positions ``span`` once, each of at most ``box_bytes``: as few
    as can be, and about equal.

    Positions are cut between blocks of ``group``, either side's, if such a block fits. Raises
    `GeometryError` when not even one position of one layer fits.
    """
    start, stop = span
    if stop <= start:
        return ()
    layer_bytes = share.position_bytes(group) // len(share.layers)
    if layer_bytes > box_bytes:
        raise GeometryError(
            f"one token of one layer of group '{share.group}' takes {layer_bytes} bytes of a "
            f"staging slot, which has {box_bytes}: raise slot_bytes to {layer_bytes} or more on "
            "both agents, and staging_bytes with it",
            field="slot_bytes",
            needed_bytes=layer_bytes,
            given_bytes=box_bytes,
        )
    ways = _ways(share, group, span, held=box_bytes // layer_bytes)
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


class _Way(NamedTuple):
    """A way to cut: layers and span into so many parts each, between multiples of a number."""

    layers_together: int
    num_layer_cuts: int
    alignment: int
    num_span_cuts: int


def _ways(share: Share, group: GroupSpec, span: tuple[int, int], *, held: int) -> Iterator[_Way]:
    """One for each number of layers together, when a box has room for ``held`` positions of one."""
    start, stop = span
    for together in range(1, min(len(share.layers), held) + 1):
        most = held // together
        alignment = group.block_size if group.block_size <= most else 1
        num_span_cuts = 1
        if stop - start > most:
            num_touched = num_blocks_for(stop, alignment) - start // alignment
            num_span_cuts = -(-num_touched // (most // alignment))
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


def _even(start: int, stop: int, num: int) -> Iterator[tuple[int, int]]:
    """[start, stop) in ``num`` intervals as equal as can be."""
    return pairwise(start + index * (stop - start) // num for index in range(num + 1))
