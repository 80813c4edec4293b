"""Tiles: a share, cut to the size of a staging slot or of a message of digests.

A digest is of a piece: one head of one part of one layer at up to 16 positions, from a multiple of
16 on. Its bytes have the order ``[token, dim]``, pieces the order ``[span, layer, part, head]``.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvbus.errors import GeometryError
from kvbus.geometry import GroupSpec, Tile, num_blocks_for
from kvbus.planning.mapping import Share, position_bytes

LONG_BLOCK_BYTES = 128 << 10
"""A tile's bytes of one block; larger copies are hardly faster."""
SPAN_TOKENS = 16
MAX_PIECES = 1 << 16
"""Their digests take 512 KiB."""


def cut_into_tiles(
    share: Share, group: GroupSpec, span: tuple[int, int], *, tile_bytes: int
) -> tuple[Tile, ...]:
    """Cut between blocks of ``group``, either side's, if one fits.

    Raises `GeometryError` if one position of one layer does not fit.
    """
    start, stop = span
    if stop <= start:
        return ()
    layer_bytes = position_bytes(share, group) // len(share.layers)
    if layer_bytes > tile_bytes:
        raise GeometryError(
            f"one token of one layer of group '{share.group}' takes {layer_bytes} bytes of a "
            f"staging slot, which has {tile_bytes}: raise slot_bytes to {layer_bytes} or more on "
            "both agents, and staging_bytes with it",
            field="slot_bytes",
            needed_bytes=layer_bytes,
            given_bytes=tile_bytes,
        )
    best = min(_ways(share, group, span, layer_bytes=layer_bytes, tile_bytes=tile_bytes))
    first_block, end_block = start // best.alignment, num_blocks_for(stop, best.alignment)
    return tuple(
        share.tile(
            share.layers[first:last],
            max(start, lo * best.alignment),
            min(stop, hi * best.alignment),
        )
        for first, last in evenly(0, len(share.layers), best.num_layer_cuts)
        for lo, hi in evenly(first_block, end_block, best.num_span_cuts)
    )


class _Way(NamedTuple):
    """The minimum is best. Order: fewest tiles; longest blocks, up to 128 KiB; fewest layers."""

    num_tiles: int
    is_short: bool
    order: int
    num_layer_cuts: int
    alignment: int
    num_span_cuts: int


def _ways(
    share: Share, group: GroupSpec, span: tuple[int, int], *, layer_bytes: int, tile_bytes: int
) -> Iterator[_Way]:
    start, stop = span
    for together in range(1, min(len(share.layers), tile_bytes // layer_bytes) + 1):
        most = tile_bytes // (layer_bytes * together)
        alignment = group.block_size if group.block_size <= most else 1
        num_layer_cuts, num_span_cuts = -(-len(share.layers) // together), 1
        if stop - start > most:
            num_touched = num_blocks_for(stop, alignment) - start // alignment
            num_span_cuts = -(-num_touched // (most // alignment))
        block_bytes = together * alignment * layer_bytes
        is_short = block_bytes < LONG_BLOCK_BYTES
        order = -block_bytes if is_short else block_bytes
        num_tiles = num_layer_cuts * num_span_cuts
        yield _Way(num_tiles, is_short, order, num_layer_cuts, alignment, num_span_cuts)


def evenly(start: int, stop: int, num: int) -> Iterator[tuple[int, int]]:
    return pairwise(start + index * (stop - start) // num for index in range(num + 1))


class Piece(NamedTuple):
    layer: int
    part: str
    head: int
    start: int
    stop: int


def num_pieces(tile: Tile) -> int:
    return len(_spans(tile.start, tile.stop)) * prod(_shape(tile))


def cut_for_digests(
    share: Share, span: tuple[int, int], *, most: int = MAX_PIECES
) -> Iterator[Tile]:
    start, stop = span
    per_layer = len(share.parts) * share.num_heads
    num_layers = min(len(share.layers), max(1, most // per_layer))
    spans = _spans(start, stop, max(1, most // (per_layer * num_layers)))
    for first in range(0, len(share.layers), num_layers):
        layers = share.layers[first : first + num_layers]
        for at in spans:
            yield share.tile(layers, max(start, at), min(stop, at + spans.step))


# Both sides choose independently, and must choose alike. The choice depends on layer and span, not
# on the position in a tile. So it does not depend on how the KV is cut. It differs between offers.
def chosen_tiles(tile: Tile, *, offer_id: str, one_in: int) -> Iterator[Tile]:
    """Yield the tiles to compare: of each span, about one layer in ``one_in``."""
    spans = _spans(tile.start, tile.stop)
    numbers = np.array(spans, np.uint64) // np.uint64(SPAN_TOKENS)
    mixed = _mixed(_seed(offer_id, tile.group) + np.array(tile.layers, np.uint64))
    is_chosen = _mixed(mixed + numbers[:, None]) % np.uint64(one_in) == 0
    for at, chosen in zip(spans, is_chosen.tolist(), strict=True):
        if any(chosen):
            layers = tuple(one for one, is_one in zip(tile.layers, chosen, strict=True) if is_one)
            start, stop = max(tile.start, at), min(tile.stop, at + SPAN_TOKENS)
            yield replace(tile, layers=layers, start=start, stop=stop)


def piece_of(tiles: Iterable[Tile], number: int) -> Piece:
    for tile in tiles:
        if number < num_pieces(tile):
            layer, part, head = map(int, np.unravel_index(number, _shape(tile)))
            head += tile.first_head
            return Piece(tile.layers[layer], tile.parts[part], head, tile.start, tile.stop)
        number -= num_pieces(tile)
    raise IndexError(f"there are {number} pieces fewer")


def _spans(start: int, stop: int, num: int = 1) -> range:
    first = start - start % SPAN_TOKENS
    return range(first, stop if stop > start else first, num * SPAN_TOKENS)


def _shape(tile: Tile) -> tuple[int, int, int]:
    return len(tile.layers), len(tile.parts), tile.num_heads


def _seed(offer_id: str, group: str) -> np.uint64:
    from hashlib import blake2b  # noqa: PLC0415 - loads 3 MB, which only digests need

    named = f"{offer_id}/{group}".encode()
    return np.uint64(int.from_bytes(blake2b(named, digest_size=8).digest(), "little"))


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble numbers by the last step of splitmix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
