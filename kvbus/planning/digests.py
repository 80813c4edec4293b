"""Digests: which pieces of a box are compared.

A piece is what one head of one part of one layer has of 16 positions in a row, from a multiple of
16 on and cut to the box, in the order ``[token, dim]``. Both sides know the same pieces, whatever
their layouts, block sizes and ranks are. They are told in the order ``[span, layer, part, head]``.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvbus.geometry import Box
from kvbus.planning.mapping import Share

SPAN_TOKENS = 16
SAMPLED_ONE_IN = 64
MAX_PIECES = 1 << 16
"""Of a box; the digests of so many take 512 KiB."""


class Piece(NamedTuple):
    """Positions [start, stop) of one head."""

    layer: int
    part: str
    head: int
    start: int
    stop: int


def num_pieces(box: Box) -> int:
    """Pieces of all spans, layers, parts and heads."""
    num_spans = -(-box.stop // SPAN_TOKENS) - box.start // SPAN_TOKENS
    return num_spans * prod(_shape(box))


def cut_for_digests(
    share: Share, span: tuple[int, int], *, most: int = MAX_PIECES
) -> Iterator[Box]:
    """Boxes of at most ``most`` pieces that have ``share`` at these positions once.

    Cut between spans, and between layers when one span of all has too many.
    """
    start, stop = span
    per_layer = len(share.parts) * share.num_heads
    num_layers = min(len(share.layers), max(1, most // per_layer))
    num_spans = max(1, most // (per_layer * num_layers))
    first_span, end_span = start // SPAN_TOKENS, -(-stop // SPAN_TOKENS)
    for first in range(0, len(share.layers), num_layers) if stop > start else ():
        for at in range(first_span, end_span, num_spans):
            yield Box(
                group=share.group,
                layers=share.layers[first : first + num_layers],
                parts=share.parts,
                first_head=share.first_head,
                num_heads=share.num_heads,
                start=max(start, at * SPAN_TOKENS),
                stop=min(stop, (at + num_spans) * SPAN_TOKENS),
            )


# Both sides choose by themselves, and alike: by which layer and span it is, not by where it is in a
# box. So the choice is the same however the KV is cut, and another one for each offer.
def chosen_boxes(box: Box, *, offer_id: str, one_in: int) -> Iterator[Box]:
    """What is compared: of each span all layers, or about one in ``one_in``, with all parts and
    heads.
    """
    spans = np.arange(box.start // SPAN_TOKENS, -(-box.stop // SPAN_TOKENS), dtype=np.uint64)
    mixed = _mixed(_seed(offer_id, box.group) + np.array(box.layers, np.uint64))
    is_chosen = _mixed(mixed + spans[:, None]) % np.uint64(one_in) == 0
    for at, chosen in zip(spans.tolist(), is_chosen.tolist(), strict=True):
        if any(chosen):
            yield replace(
                box,
                layers=tuple(one for one, is_one in zip(box.layers, chosen, strict=True) if is_one),
                start=max(box.start, at * SPAN_TOKENS),
                stop=min(box.stop, (at + 1) * SPAN_TOKENS),
            )


def piece_of(boxes: Iterable[Box], number: int) -> Piece:
    """The piece of a number among those of `chosen_boxes`; raises `IndexError`."""
    for box in boxes:
        if number < num_pieces(box):
            layer, part, head = map(int, np.unravel_index(number, _shape(box)))
            head += box.first_head
            return Piece(box.layers[layer], box.parts[part], head, box.start, box.stop)
        number -= num_pieces(box)
    raise IndexError(f"there are {number} pieces fewer")


def _shape(box: Box) -> tuple[int, int, int]:
    return len(box.layers), len(box.parts), box.num_heads


def _seed(offer_id: str, group: str) -> np.uint64:
    named = f"{offer_id}/{group}".encode()
    return np.uint64(int.from_bytes(blake2b(named, digest_size=8).digest(), "little"))


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The numbers as if drawn: the last step of splitmix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
