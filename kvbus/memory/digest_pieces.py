"""Digests of pieces of this process's memory: XXH3 of 64 bits, from the package `xxhash`.

Addresses are the caller's to check.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec.structs import replace

from kvbus.geometry import AxisName, BlockTable, Box, SlotOrder, slot_bytes, slot_table
from kvbus.memory.copying import PagedMemory, Slot, address_of, gather
from kvbus.memory.run_copy import copy_runs
from kvbus.planning import Lattice as CopyLattice
from kvbus.planning import PlacedRank, Runs, slot_rank
from kvbus.planning.digests import SPAN_TOKENS, Lattice, Numbers, PieceMap

Digests = npt.NDArray[np.uint64]
BY_PIECE = SlotOrder(
    (AxisName.LAYER, AxisName.KV, AxisName.HEAD, AxisName.BLOCK, AxisName.TOKEN, AxisName.DIM), 1
)
"""Each piece in one run."""


def digest_pieces(lattice: Lattice, pieces: Numbers) -> Digests:
    """The digest of each of ``pieces``, which are span * number of the lattice's corners + corner.

    All memory must be mapped and stay so. Pieces of one length are brought together at once.
    """
    spans, corners = np.divmod(pieces, lattice.corners.size)
    firsts, lengths = lattice.edges[spans], np.diff(lattice.edges)[spans]
    found = np.empty(pieces.size, np.uint64)
    for length in np.unique(lengths).tolist():
        which = np.flatnonzero(lengths == length)
        rows = lattice.positions[firsts[which][:, None] + np.arange(length)]
        rows += lattice.corners[corners[which]][:, None]
        found[which] = [xxhash.xxh3_64_intdigest(one) for one in _gathered(lattice, rows)]
    return found


def _gathered(lattice: Lattice, rows: Numbers) -> npt.NDArray[np.uint8]:
    """Bytes of pieces whose rows start at these addresses: [piece, byte]."""
    gathered = np.empty((len(rows), rows.shape[1] * lattice.row_bytes), np.uint8)
    targets = address_of(gathered) + np.arange(rows.size) * lattice.row_bytes
    runs = np.arange(lattice.num_runs)
    copies = CopyLattice(
        outer=np.stack((rows.reshape(-1), targets)),
        units=np.zeros((2, 1), np.int64),
        inner=np.stack((runs * lattice.step_bytes, runs * lattice.run_bytes)),
        run_bytes=lattice.run_bytes,
    )
    copy_runs(Runs(lattices=(copies,)))
    return gathered


def digest_gathered(
    memory: PagedMemory, table: BlockTable, box: Box, pieces: Numbers, *, buffer_bytes: int
) -> Digests:
    """The digests of ``pieces`` of ``box``, of memory that this process cannot look into.

    It is gathered into a buffer of about ``buffer_bytes``, part by part. Raises `GeometryError` as
    `gather` does.
    """
    found = np.empty(pieces.size, np.uint64)
    num_corners = len(box.layers) * len(box.parts) * box.num_heads
    first_span = box.start // SPAN_TOKENS
    for part in _parts(memory, box, buffer_bytes):
        skipped = (part.start // SPAN_TOKENS - first_span) * num_corners
        end = (-(-part.stop // SPAN_TOKENS) - first_span) * num_corners
        low, high = np.searchsorted(pieces, (skipped, end))
        buffer = np.empty(slot_bytes(memory.group, part, BY_PIECE), np.uint8)
        gather(memory, table, part, Slot(buffer, BY_PIECE))
        slot = slot_rank(memory.placed, part, BY_PIECE)
        at = dict.fromkeys(slot.addresses, address_of(buffer))
        lattices = PieceMap(PlacedRank(slot.engine, slot.rank, at)).lattices
        (lattice,) = lattices(part, slot_table(part, BY_PIECE))
        found[low:high] = digest_pieces(lattice, pieces[low:high] - skipped)
    return found


def _parts(memory: PagedMemory, box: Box, buffer_bytes: int) -> Iterator[Box]:
    """The box, cut between spans."""
    one_span = replace(box, start=0, stop=SPAN_TOKENS)
    num_spans = max(1, buffer_bytes // slot_bytes(memory.group, one_span, BY_PIECE))
    first, step = box.start // SPAN_TOKENS * SPAN_TOKENS, num_spans * SPAN_TOKENS
    for at in range(first, box.stop, step):
        yield replace(box, start=max(box.start, at), stop=min(box.stop, at + step))
