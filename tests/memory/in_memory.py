"""The sides of a drawn handoff in real memory, and all of it moved through staging slots."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import torch
from hypothesis import strategies as st

from kvbus.geometry import AxisName, Box, SlotOrder, canonical_order, slot_bytes, slot_table
from kvbus.memory import PagedMemory, Slot, gather, scatter, zero_positions
from kvbus.memory.cuda import GpuMover
from kvbus.planning import (
    PlacedRank,
    ReadMap,
    RunPlan,
    Share,
    cut_into_boxes,
    reader_order,
    slot_plan,
)
from tests.planning.handoffs import Case, Side, where_elements_lie


class InMemory:
    """One side of a handoff; ``content`` is that of its memory, by default what was drawn.

    ``as_gpu`` has it copied by what copies memory of GPUs.
    """

    def __init__(
        self, side: Side, content: bytes = b"", *, device: str = "cpu", as_gpu: bool = False
    ) -> None:
        self.side, self.as_gpu = side, as_gpu or device != "cpu"
        self.bytes = torch.frombuffer(bytearray(content or side.memory), dtype=torch.uint8)
        self.bytes = self.bytes.to(device)

    def content(self) -> bytes:
        return self.bytes.cpu().numpy().tobytes()

    def placed(self, rank: int) -> PlacedRank:
        """The rank at its true addresses."""
        placed, moved = self.side.ranks[rank], self.bytes.data_ptr() - self.side.base
        return replace(placed, addresses={n: at + moved for n, at in placed.addresses.items()})

    def paged(self, rank: int, group: str) -> PagedMemory:
        placed = self.side.ranks[rank]
        buffers = {}
        for segment in placed.rank.segments:
            first = placed.addresses[segment.segment_id] - self.side.base
            whole = self.bytes[first : first + segment.size_bytes]
            buffers[segment.segment_id] = whole if self.as_gpu else whole.numpy()
        return PagedMemory(placed.engine.group(group), placed.rank.regions, buffers)


def plan_between(case: Case, prefill: InMemory, decode: InMemory) -> RunPlan:
    """At true addresses."""
    holders, readers = (
        {rank: side.placed(rank) for rank in side.side.ranks} for side in (prefill, decode)
    )
    return RunPlan(holders, readers, ReadMap(*case.ranks).shares(case.replica_index))


orders = st.one_of(
    st.none(),
    st.just(canonical_order()),
    st.builds(SlotOrder, st.permutations(list(AxisName)).map(tuple), st.integers(1, 6)),
)
"""How boxes lie in their slots; None for the order of each reader."""


def boxes_of(
    case: Case, order: SlotOrder | None, *, room: int
) -> Iterator[tuple[Share, Box, SlotOrder, bool]]:
    """Boxes of up to ``room`` times the least one; True where they are read block by block."""
    reads, spans = ReadMap(*case.ranks), case.spans()
    for share in (reads.joined if order else reads.shares)(case.replica_index):
        placed = case.decode.ranks[share.reader]
        group = placed.engine.group(share.group)
        readers = None if order else reader_order(placed.rank.regions, group)
        used = readers or order or canonical_order()
        least = share.position_bytes(group) // len(share.layers) * used.block_size
        for box in cut_into_boxes(
            share, group, spans[share.group], order=used, box_bytes=room * least
        ):
            yield share, box, used, readers is not None


def move_through_slots(
    case: Case,
    prefill: InMemory,
    decode: InMemory,
    order: SlotOrder | None,
    *,
    room: int = 4,
    new_slot: Callable[[int], torch.Tensor],
    is_apart: bool = False,
) -> None:
    """Gather each box; scatter it, or read blocks out of a slot that is in the reader's order.

    ``is_apart`` has slots on what torch takes for another device than the ranks'.
    """
    for share, box, used, by_blocks in boxes_of(case, order, room=room):
        holder = prefill.paged(share.holder, share.group)
        readers = {rank: decode.paged(rank, share.group) for rank in share.readers}
        if is_apart:
            for memory in (holder, *readers.values()):
                if isinstance(memory.mover, GpuMover):
                    memory.mover.device = torch.device("cpu", 0)
        num_bytes = slot_bytes(holder.group, box, used)
        whole = new_slot(num_bytes)
        slot = Slot(whole if prefill.as_gpu else whole.numpy(), used)
        beyond = whole[num_bytes:].clone()

        gather(holder, case.prefill.tables[box.group], box, slot)
        for rank, memory in readers.items():
            table = case.decode.tables[box.group]
            if not by_blocks:
                scatter(memory, table, box, slot)
                continue
            blocks = slot_table(box, used)
            shape = msgspec.structs.replace(box, start=0, stop=len(blocks) * used.block_size)
            plan = slot_plan(case.decode.ranks[rank], shape, used, into_slot=False)
            spans = {box.group: (box.start, box.stop)}
            for target, source, size in plan.runs({box.group: blocks}, {box.group: table}, spans):
                to = target - case.decode.base
                decode.bytes[to : to + size] = whole[source : source + size]
        assert torch.equal(whole[num_bytes:], beyond)


def zero_what_is_moved(case: Case, decode: InMemory) -> None:
    """The positions of a fetch, in all that each rank has of each group."""
    for rank, placed in case.decode.ranks.items():
        for group in {region.group for region in placed.rank.regions}:
            table, span = case.decode.tables[group], case.spans()[group]
            zero_positions(decode.paged(rank, group), table, *span)


def zeroed_by_loops(case: Case) -> bytes:
    """The memory of the decode side afterwards."""
    after = bytearray(case.decode.memory)
    for placed in case.decode.ranks.values():
        for _, at, num_bytes in where_elements_lie(case.decode, placed, case.moved()):
            after[at : at + num_bytes] = bytes(num_bytes)
    return bytes(after)
