"""Digests of memory that this process cannot look into: gathered into a host buffer first."""

from collections.abc import Iterator

import msgspec
import numpy as np
import torch

from kvbus.geometry import (
    AxisName,
    BlockTable,
    Box,
    EngineSpec,
    RankSpec,
    Segment,
    SlotOrder,
    slot_bytes,
    slot_region,
    slot_table,
)
from kvbus.memory.copying import Slot, gather
from kvbus.memory.digest_pieces import Digests, digest_pieces
from kvbus.memory.paged import PagedMemory
from kvbus.planning import PlacedRank, digests
from kvbus.planning.digests import Numbers, PieceMap

BY_PIECE = SlotOrder(
    (
        AxisName.LAYER,
        AxisName.KV,
        AxisName.HEAD,
        AxisName.BLOCK,
        AxisName.TOKEN,
        AxisName.DIM,
    ),
    1,
)
"""Each piece in one run."""


def digest_gathered(
    memory: PagedMemory, table: BlockTable, box: Box, pieces: Numbers, *, buffer_bytes: int
) -> Digests:
    """The digests of ``pieces`` of ``box``, gathered in parts of about ``buffer_bytes``.

    Raises `GeometryError` as `gather` does. What was queued on the device is waited for.
    """
    found = np.empty(pieces.size, np.uint64)
    num_corners = len(box.layers) * len(box.parts) * box.num_heads
    first_span = box.start // digests.SPAN_TOKENS
    for part in _parts(memory, box, buffer_bytes):
        skipped = (part.start // digests.SPAN_TOKENS - first_span) * num_corners
        end = (-(-part.stop // digests.SPAN_TOKENS) - first_span) * num_corners
        low, high = np.searchsorted(pieces, (skipped, end))
        buffer = torch.empty(slot_bytes(memory.group, part, BY_PIECE), dtype=torch.uint8)
        gather(memory, table, part, Slot(buffer, BY_PIECE))
        if memory.device.type == "cuda":
            torch.cuda.current_stream(memory.device).synchronize()
        (lattice,) = _in_buffer(memory, part, buffer).lattices(part, slot_table(part, BY_PIECE))
        found[low:high] = digest_pieces(lattice, pieces[low:high] - skipped)
    return found


def _parts(memory: PagedMemory, box: Box, buffer_bytes: int) -> Iterator[Box]:
    """The box, cut between spans."""
    one_span = msgspec.structs.replace(box, start=0, stop=digests.SPAN_TOKENS)
    step = (
        max(1, buffer_bytes // slot_bytes(memory.group, one_span, BY_PIECE)) * digests.SPAN_TOKENS
    )
    first = box.start // digests.SPAN_TOKENS * digests.SPAN_TOKENS
    for at in range(first, box.stop, step):
        yield msgspec.structs.replace(box, start=max(box.start, at), stop=min(box.stop, at + step))


def _in_buffer(memory: PagedMemory, box: Box, buffer: torch.Tensor) -> PieceMap:
    """Where the pieces lie in the buffer."""
    group = msgspec.structs.replace(memory.group, block_size=BY_PIECE.block_size)
    region = slot_region(memory.group, box, BY_PIECE)
    rank = RankSpec(0, (Segment(region.segment_id, buffer.numel()),), (region,))
    engine = EngineSpec("slot", "slot", 1, (group,))
    return PieceMap(PlacedRank(engine, rank, {region.segment_id: buffer.data_ptr()}))
