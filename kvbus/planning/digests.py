"""Digests: which pieces of a box are compared, and where each of them lies in a rank's memory.

A piece is what one head of one part of one layer has of 16 positions in a row, from a multiple of
16 on and cut to the box, in the order ``[token, dim]``. Both sides know the same pieces, whatever
their layouts, block sizes and ranks are. Axes of a box's pieces: ``[span, layer, part, head]``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvbus.geometry import DTYPE_SIZES_BYTES, AxisName, BlockTable, Box, GroupSpec, Region
from kvbus.planning.mapping import Share
from kvbus.planning.pairs import held_region, regions_by_part
from kvbus.planning.run_plan import PlacedRank

SPAN_TOKENS = 16
SAMPLED_ONE_IN = 64
MAX_PIECES = 1 << 16
"""Of a box; the digests of so many take 512 KiB."""
MOST_CORNERS = 64
"""Choices of layers, parts and heads whose corners are kept for a rank, some 20 KB each."""

Numbers = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """Positions [start, stop) of one head."""

    layer: int
    part: str
    head: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Lattice:
    """Where pieces lie whose regions have the same strides.

    A row of a piece starts at the address of its corner plus the offset of its position, and has
    ``num_runs`` runs of ``run_bytes``, ``step_bytes`` apart. ``edges`` cut the positions into
    spans. ``numbers`` are those of the corners within ``[layer, part, head]`` of the box.
    """

    corners: Numbers
    numbers: Numbers
    positions: Numbers
    edges: Numbers
    num_runs: int
    run_bytes: int
    step_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes at one position of a piece."""
        return self.num_runs * self.run_bytes


def span_edges(start: int, stop: int) -> Numbers:
    """Where spans of positions [start, stop) begin, and the end of the last."""
    inner = np.arange(start // SPAN_TOKENS + 1, -(-stop // SPAN_TOKENS)) * SPAN_TOKENS
    return np.concatenate(([start], inner, [stop])).astype(np.int64)


def num_pieces(box: Box) -> int:
    """Pieces of all spans, layers, parts and heads."""
    num_spans = -(-box.stop // SPAN_TOKENS) - box.start // SPAN_TOKENS
    return num_spans * len(box.layers) * len(box.parts) * box.num_heads


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


# Both sides choose by themselves, and alike: by what a piece is, not by where it is in a box. So
# the choice is the same however the KV is cut, and another one for each offer.
def chosen_pieces(box: Box, *, offer_id: str, one_in: int) -> Numbers:
    """Numbers of the pieces that are compared: all, or about one in ``one_in``, K and V alike."""
    if one_in == 1:
        return np.arange(num_pieces(box))
    spans = np.arange(box.start // SPAN_TOKENS, -(-box.stop // SPAN_TOKENS))
    heads = np.arange(box.first_head, box.first_head + box.num_heads)
    mixed = _mixed(_seed(offer_id, box.group) + np.array(box.layers, np.uint64))
    mixed = _mixed(mixed[:, None] + heads.astype(np.uint64))
    mixed = _mixed(mixed + spans.astype(np.uint64)[:, None, None])
    is_chosen = (mixed % np.uint64(one_in) == 0)[:, :, None, :]
    shape = (len(spans), len(box.layers), len(box.parts), box.num_heads)
    return np.flatnonzero(np.broadcast_to(is_chosen, shape))


def piece_of(box: Box, number: int) -> Piece:
    """The piece of a number."""
    edges = span_edges(box.start, box.stop)
    shape = (edges.size - 1, len(box.layers), len(box.parts), box.num_heads)
    span, layer, part, head = map(int, np.unravel_index(number, shape))
    return Piece(
        layer=box.layers[layer],
        part=box.parts[part],
        head=box.first_head + head,
        start=int(edges[span]),
        stop=int(edges[span + 1]),
    )


def by_lattice(
    lattices: Sequence[Lattice], pieces: Numbers
) -> Iterator[tuple[Lattice, Numbers, Numbers]]:
    """Which of ``pieces`` are in each lattice, and their numbers there."""
    num_corners = sum(lattice.corners.size for lattice in lattices)
    spans, corners = np.divmod(pieces, num_corners)
    for lattice in lattices:
        own = np.full(num_corners, -1)
        own[lattice.numbers] = np.arange(lattice.corners.size)
        found = np.flatnonzero(own[corners] >= 0)
        yield lattice, found, spans[found] * lattice.corners.size + own[corners[found]]


class _Strides(NamedTuple):
    """Bytes from one index to the next."""

    block: int
    token: int
    dim: int


class PieceMap:
    """Where the pieces of one rank lie; several threads may ask at once.

    What it finds of a box's layers, parts and heads is kept, of the last `MOST_CORNERS`: readers
    ask for any.
    """

    def __init__(self, placed: PlacedRank) -> None:
        self._placed = placed
        self._region_of = regions_by_part(placed.rank)
        self._corners = lru_cache(MOST_CORNERS)(self._find_corners)

    def lattices(self, box: Box, table: BlockTable) -> list[Lattice]:
        """All pieces of ``box``, each in one of these; ``table`` has its positions.

        Raises `GeometryError` for a layer, part or head that the rank has not.
        """
        group = self._placed.engine.group(box.group)
        found = self._corners(replace(box, start=0, stop=1))
        edges = span_edges(box.start, box.stop)
        rows, tokens = np.divmod(np.arange(box.start, box.stop), group.block_size)
        blocks = table.array()[rows - table.first_block].astype(np.int64)
        return [
            Lattice(
                corners=corners,
                numbers=numbers,
                positions=blocks * strides.block + tokens * strides.token,
                edges=edges - box.start,
                **_runs(group, box.parts[0], strides.dim),
            )
            for strides, (corners, numbers) in found.items()
        ]

    def _find_corners(self, box: Box) -> Mapping[_Strides, tuple[Numbers, Numbers]]:
        """Addresses of position 0 of block 0, and which pieces of a span these are."""
        found: dict[_Strides, list[Numbers]] = {}
        heads, at = np.arange(box.num_heads), 0
        for layer in box.layers:
            for part in box.parts:
                region = held_region(self._region_of, box, layer, part)
                first, head_bytes = self._corner(region, layer, part, box.first_head)
                steps = map(region.stride_bytes, (AxisName.BLOCK, AxisName.TOKEN, AxisName.DIM))
                pair = np.stack((first + heads * head_bytes, at + heads))
                found.setdefault(_Strides(*steps), []).append(pair)
                at += box.num_heads
        joined = {strides: np.concatenate(pairs, axis=1) for strides, pairs in found.items()}
        return {strides: (pairs[0], pairs[1]) for strides, pairs in joined.items()}

    def _corner(self, region: Region, layer: int, part: str, first_head: int) -> tuple[int, int]:
        head_bytes = region.stride_bytes(AxisName.HEAD)
        offset_bytes = (
            region.offset_bytes
            + region.layers.index(layer) * region.stride_bytes(AxisName.LAYER)
            + region.parts.index(part) * region.stride_bytes(AxisName.KV)
            + (first_head - region.first_head) * head_bytes
        )
        return self._placed.addresses[region.segment_id] + offset_bytes, head_bytes


def _runs(group: GroupSpec, part: str, dim_bytes: int) -> dict[str, int]:
    """Of one row: a single run where the elements of a head follow each other."""
    head_dim, itemsize = group.part_shape(part).head_dim, DTYPE_SIZES_BYTES[group.dtype]
    if dim_bytes == itemsize or head_dim == 1:
        return {"num_runs": 1, "run_bytes": head_dim * itemsize, "step_bytes": 0}
    return {"num_runs": head_dim, "run_bytes": itemsize, "step_bytes": dim_bytes}


def _seed(offer_id: str, group: str) -> np.uint64:
    named = f"{offer_id}/{group}".encode()
    return np.uint64(int.from_bytes(blake2b(named, digest_size=8).digest(), "little"))


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The numbers as if drawn: the last step of splitmix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
