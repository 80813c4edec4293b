"""Boxes: a share cut to what a staging slot holds, or to what one message of digests compares.

What is compared are pieces. A piece is what one head of one part of one layer has of 16 positions
in a row, from a multiple of 16 on and cut to the box, in the order ``[token, dim]``. Both sides
know the same pieces, whatever their layouts, block sizes and ranks are. They are told in the order
``[span, layer, part, head]``.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvbus.errors import GeometryError
from kvbus.geometry import Box, GroupSpec, num_blocks_for
from kvbus.planning.mapping import Share, position_bytes

LONG_BLOCK_BYTES = 128 << 10
"""What a box has of one block, from which on copying more at a time is hardly faster."""
SPAN_TOKENS = 16
MAX_PIECES = 1 << 16
"""Of a box; the digests of so many take 512 KiB."""


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
    layer_bytes = position_bytes(share, group) // len(share.layers)
    if layer_bytes > box_bytes:
        raise GeometryError(
            f"one token of one layer of group '{share.group}' takes {layer_bytes} bytes of a "
            f"staging slot, which has {box_bytes}: raise slot_bytes to {layer_bytes} or more on "
            "both agents, and staging_bytes with it",
            field="slot_bytes",
            needed_bytes=layer_bytes,
            given_bytes=box_bytes,
        )
    best = min(_ways(share, group, span, layer_bytes=layer_bytes, box_bytes=box_bytes))
    first_block, end_block = start // best.alignment, num_blocks_for(stop, best.alignment)
    return tuple(
        share.box(
            share.layers[first:last],
            max(start, lo * best.alignment),
            min(stop, hi * best.alignment),
        )
        for first, last in evenly(0, len(share.layers), best.num_layer_cuts)
        for lo, hi in evenly(first_block, end_block, best.num_span_cuts)
    )


class _Way(NamedTuple):
    """A way to cut: layers and span into so many parts each, between multiples of ``alignment``.

    The least is the best: fewest boxes first, then long blocks, of short ones the longest, of long
    ones those of few layers, as each layer may be a copy of its own.
    """

    num_boxes: int
    is_short: bool
    order: int
    num_layer_cuts: int
    alignment: int
    num_span_cuts: int


def _ways(
    share: Share, group: GroupSpec, span: tuple[int, int], *, layer_bytes: int, box_bytes: int
) -> Iterator[_Way]:
    """One for each number of layers together of which a box has room for one position."""
    start, stop = span
    for together in range(1, min(len(share.layers), box_bytes // layer_bytes) + 1):
        most = box_bytes // (layer_bytes * together)
        alignment = group.block_size if group.block_size <= most else 1
        num_layer_cuts, num_span_cuts = -(-len(share.layers) // together), 1
        if stop - start > most:
            num_touched = num_blocks_for(stop, alignment) - start // alignment
            num_span_cuts = -(-num_touched // (most // alignment))
        block_bytes = together * alignment * layer_bytes
        is_short = block_bytes < LONG_BLOCK_BYTES
        order = -block_bytes if is_short else block_bytes
        num_boxes = num_layer_cuts * num_span_cuts
        yield _Way(num_boxes, is_short, order, num_layer_cuts, alignment, num_span_cuts)


def evenly(start: int, stop: int, num: int) -> Iterator[tuple[int, int]]:
    """[start, stop) in ``num`` intervals as equal as can be."""
    return pairwise(start + index * (stop - start) // num for index in range(num + 1))


class Piece(NamedTuple):
    """Positions [start, stop) of one head."""

    layer: int
    part: str
    head: int
    start: int
    stop: int


def num_pieces(box: Box) -> int:
    """Pieces of all spans, layers, parts and heads."""
    return len(_spans(box.start, box.stop)) * prod(_shape(box))


def cut_for_digests(
    share: Share, span: tuple[int, int], *, most: int = MAX_PIECES
) -> Iterator[Box]:
    """Boxes of at most ``most`` pieces that have ``share`` at these positions once.

    Cut between spans, and between layers when one span of all has too many.
    """
    start, stop = span
    per_layer = len(share.parts) * share.num_heads
    num_layers = min(len(share.layers), max(1, most // per_layer))
    spans = _spans(start, stop, max(1, most // (per_layer * num_layers)))
    for first in range(0, len(share.layers), num_layers):
        layers = share.layers[first : first + num_layers]
        for at in spans:
            yield share.box(layers, max(start, at), min(stop, at + spans.step))


# Both sides choose by themselves, and alike: by which layer and span it is, not by where it is in a
# box. So the choice is the same however the KV is cut, and another one for each offer.
def chosen_boxes(box: Box, *, offer_id: str, one_in: int) -> Iterator[Box]:
    """What is compared: of each span all layers, or about one in ``one_in``, with all parts and
    heads.
    """
    spans = _spans(box.start, box.stop)
    numbers = np.array(spans, np.uint64) // np.uint64(SPAN_TOKENS)
    mixed = _mixed(_seed(offer_id, box.group) + np.array(box.layers, np.uint64))
    is_chosen = _mixed(mixed + numbers[:, None]) % np.uint64(one_in) == 0
    for at, chosen in zip(spans, is_chosen.tolist(), strict=True):
        if any(chosen):
            layers = tuple(one for one, is_one in zip(box.layers, chosen, strict=True) if is_one)
            start, stop = max(box.start, at), min(box.stop, at + SPAN_TOKENS)
            yield replace(box, layers=layers, start=start, stop=stop)


def piece_of(boxes: Iterable[Box], number: int) -> Piece:
    """The piece of a number among those of `chosen_boxes`; raises `IndexError`."""
    for box in boxes:
        if number < num_pieces(box):
            layer, part, head = map(int, np.unravel_index(number, _shape(box)))
            head += box.first_head
            return Piece(box.layers[layer], box.parts[part], head, box.start, box.stop)
        number -= num_pieces(box)
    raise IndexError(f"there are {number} pieces fewer")


def _spans(start: int, stop: int, num: int = 1) -> range:
    """Where the spans of positions [start, stop) begin, ``num`` at a time."""
    first = start - start % SPAN_TOKENS
    return range(first, stop if stop > start else first, num * SPAN_TOKENS)


def _shape(box: Box) -> tuple[int, int, int]:
    return len(box.layers), len(box.parts), box.num_heads


def _seed(offer_id: str, group: str) -> np.uint64:
    from hashlib import blake2b  # noqa: PLC0415 - loads 3 MB, which only digests need

    named = f"{offer_id}/{group}".encode()
    return np.uint64(int.from_bytes(blake2b(named, digest_size=8).digest(), "little"))


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The numbers as if drawn: the last step of splitmix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
