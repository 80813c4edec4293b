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
from kvbus.planning.pairs import PlacedRank, held_region, regions_by_part

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
        self._plan = lru_cache(MAX_PLANS)(partial(slot_plan, reader, into_slot=False))

    def descriptors(self, box: Box, order: SlotOrder, *, table: BlockTable) -> Descriptors:
        """From a slot at address 0 into the rank's blocks of ``table``; the caller's to change."""
        blocks = slot_table(box, order)
        shape = msgspec.structs.replace(box, start=0, stop=len(blocks) * order.block_size)
        return self._plan(shape, order).descriptors(
            {box.group: blocks}, {box.group: table}, {box.group: (box.start, box.stop)}
        )


def slot_plan(placed: PlacedRank, box: Box, order: SlotOrder, *, into_slot: bool) -> DirectPlan:
    """The runs between a rank's blocks and a slot at address 0; ``box`` starts at position 0.

    Raises `GeometryError` for a layer, part or head that the rank does not hold.
    """
    region_of = regions_by_part(placed.rank)
    for layer in box.layers:
        for part in box.parts:
            held_region(region_of, box, layer, part)
    slot = slot_rank(placed, box, order)
    share = Share(
        holder=0,
        reader=0,
        group=box.group,
        layers=box.layers,
        parts=box.parts,
        first_head=box.first_head,
        num_heads=box.num_heads,
    )
    source, target = (placed, slot) if into_slot else (slot, placed)
    return DirectPlan({0: source}, {0: target}, [share])


def slot_rank(placed: PlacedRank, box: Box, order: SlotOrder) -> PlacedRank:
    """A slot as the planner sees ranks: one region at address 0, in blocks of the order's."""
    group = placed.engine.group(box.group)
    region = slot_region(group, box, order)
    segment = Segment(region.segment_id, slot_bytes(group, box, order))
    in_slot = msgspec.structs.replace(group, block_size=order.block_size)
    return PlacedRank(
        engine=msgspec.structs.replace(placed.engine, groups=(in_slot,)),
        rank=RankSpec(rank=0, segments=(segment,), regions=(region,)),
        addresses={region.segment_id: 0},
    )
