"""READs out of the prefill agent's slots: of a whole slot, or block by block into an engine."""

from functools import lru_cache, partial

import msgspec
import numpy as np

from kvbus.geometry import (
    BlockTable,
    Box,
    RankSpec,
    Segment,
    SlotOrder,
    slot_bytes,
    slot_region,
    slot_table,
)
from kvbus.planning.direct import Descriptors, DirectPlan
from kvbus.planning.mapping import Share
from kvbus.planning.pairs import PlacedRank

MAX_PLANS = 1024


def whole_slot(local: tuple[int, int], remote: tuple[int, int], num_bytes: int) -> Descriptors:
    """One READ from their slot to ours, each (address, device)."""
    return Descriptors(
        local=np.array([[local[0], num_bytes, local[1]]], dtype=np.uint64),
        remote=np.array([[remote[0], num_bytes, remote[1]]], dtype=np.uint64),
    )


def from_slot(reads: Descriptors, address: int, device: int) -> Descriptors:
    """READs of a slot at address 0, which are changed, as READs of the slot where it is."""
    reads.remote[:, 0] += np.uint64(address)
    reads.remote[:, 2] = device
    return reads


class SlotReads:
    """READs from slots in the order of a rank into its blocks; the plans of a shape are kept."""

    def __init__(self, reader: PlacedRank) -> None:
        self._plan = lru_cache(MAX_PLANS)(partial(_plan, reader))

    def descriptors(self, box: Box, order: SlotOrder, *, table: BlockTable) -> Descriptors:
        """From a slot at address 0 into the rank's blocks of ``table``; the caller's to change."""
        blocks = slot_table(box, order)
        shape = msgspec.structs.replace(box, start=0, stop=len(blocks) * order.block_size)
        return self._plan(shape, order).descriptors(
            {box.group: blocks}, {box.group: table}, {box.group: (box.start, box.stop)}
        )


def _plan(reader: PlacedRank, box: Box, order: SlotOrder) -> DirectPlan:
    slot = slot_rank(reader, box, order)
    share = Share(
        holder=slot.rank.rank,
        reader=reader.rank.rank,
        group=box.group,
        layers=box.layers,
        parts=box.parts,
        first_head=box.first_head,
        num_heads=box.num_heads,
    )
    return DirectPlan({share.holder: slot}, {share.reader: reader}, [share])


def slot_rank(reader: PlacedRank, box: Box, order: SlotOrder) -> PlacedRank:
    """A slot as the planner sees ranks: one region at address 0, in blocks of the order's."""
    group = reader.engine.group(box.group)
    region = slot_region(group, box, order)
    segment = Segment(region.segment_id, slot_bytes(group, box, order))
    in_slot = msgspec.structs.replace(group, block_size=order.block_size)
    return PlacedRank(
        engine=msgspec.structs.replace(reader.engine, groups=(in_slot,)),
        rank=RankSpec(rank=0, segments=(segment,), regions=(region,)),
        addresses={region.segment_id: 0},
    )
