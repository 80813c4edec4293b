"""Boxes: a share, cut to the size of a staging slot or of a message of digests.

Digests compare pieces. A piece is one head of one part of one layer at up to 16 positions: from a
multiple of 16 on, cut to the box. Its bytes are in the order ``[token, dim]``, and pieces are in
the order ``[span, layer, part, head]``. So both sides derive the same pieces, for all layouts,
block sizes and ranks.
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
"""A box's bytes of one block; larger copies are hardly faster."""
SPAN_TOKENS = 16
MAX_PIECES = 1 << 16
"""Per box. Their digests take 512 KiB."""


def cut_into_boxes(
    share: Share, group: GroupSpec, span: tuple[int, int], *, box_bytes: int
) -> tuple[Box, ...]:
    """Cut ``share`` at positions ``span`` into as few boxes as possible, about equal.

    Positions are cut between blocks of ``group``, either side's, if one fits. Raises
    `GeometryError` if one position of one layer does not fit.
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
    """A cut of layers and span into parts; the span is cut at multiples of ``alignment``.

    The minimum is best. Order: fewest boxes; then the longest blocks, up to 128 KiB; then the
    fewest layers, as each layer may be a separate copy.
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
    return pairwise(start + index * (stop - start) // num for index in range(num + 1))


class Piece(NamedTuple):
    """Positions [start, stop) of one head."""

    layer: int
    part: str
    head: int
    start: int
    stop: int


def num_pieces(box: Box) -> int:
    return len(_spans(box.start, box.stop)) * prod(_shape(box))


def cut_for_digests(
    share: Share, span: tuple[int, int], *, most: int = MAX_PIECES
) -> Iterator[Box]:
    """Yield boxes of at most ``most`` pieces that cover ``share`` once.

    They are cut between spans, and between layers if one span has too many pieces.
    """
    start, stop = span
    per_layer = len(share.parts) * share.num_heads
    num_layers = min(len(share.layers), max(1, most // per_layer))
    spans = _spans(start, stop, max(1, most // (per_layer * num_layers)))
    for first in range(0, len(share.layers), num_layers):
        layers = share.layers[first : first + num_layers]
        for at in spans:
            yield share.box(layers, max(start, at), min(stop, at + spans.step))


# Both sides choose independently, and must choose alike. The choice depends on layer and span, not
# on the position in a box. So it does not depend on how the KV is cut. It differs between offers.
def chosen_boxes(box: Box, *, offer_id: str, one_in: int) -> Iterator[Box]:
    """Yield the boxes to compare: of each span, about one layer in ``one_in``."""
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
    """Return a piece by its number in `chosen_boxes`; raises `IndexError`."""
    for box in boxes:
        if number < num_pieces(box):
            layer, part, head = map(int, np.unravel_index(number, _shape(box)))
            head += box.first_head
            return Piece(box.layers[layer], box.parts[part], head, box.start, box.stop)
        number -= num_pieces(box)
    raise IndexError(f"there are {number} pieces fewer")


def _spans(start: int, stop: int, num: int = 1) -> range:
    first = start - start % SPAN_TOKENS
    return range(first, stop if stop > start else first, num * SPAN_TOKENS)


def _shape(box: Box) -> tuple[int, int, int]:
    return len(box.layers), len(box.parts), box.num_heads


def _seed(offer_id: str, group: str) -> np.uint64:
    from hashlib import blake2b  # noqa: PLC0415 - loads 3 MB, which only digests need

    named = f"{offer_id}/{group}".encode()
    return np.uint64(int.from_bytes(blake2b(named, digest_size=8).digest(), "little"))


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble numbers by the last step of splitmix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
