"""The sides of a drawn handoff in real memory, and all of it moved through staging slots."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from kvbus.geometry import Tile, slot_bytes
from kvbus.memory.copying import PagedMemory
from kvbus.memory.cuda import GpuMover
from kvbus.planning import PlacedRank, ReadMap, RunPlan, Share, cut_into_tiles, position_bytes
from tests.unit.planning.handoffs import Case, Side, where_elements_lie


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
        placed, moved = self.side.ranks[rank], self.bytes.data_ptr() - self.side.base
        return replace(placed, addresses={n: at + moved for n, at in placed.addresses.items()})

    def paged(self, rank: int, group: str) -> PagedMemory:
        placed = self.side.ranks[rank]
        buffers: dict[str, Any] = {}
        for segment in placed.rank.segments:
            first = placed.addresses[segment.segment_id] - self.side.base
            whole = self.bytes[first : first + segment.size_bytes]
            buffers[segment.segment_id] = whole if self.as_gpu else whole.numpy()
        mover = GpuMover(list(buffers.values())) if self.as_gpu else None
        return PagedMemory(placed.engine.group(group), placed.rank.regions, buffers, mover=mover)


def plan_between(case: Case, prefill: InMemory, decode: InMemory) -> RunPlan:
    sides = prefill, decode
    holders, readers = ({rank: one.placed(rank) for rank in one.side.ranks} for one in sides)
    return RunPlan(holders, readers, ReadMap(*case.ranks).shares(case.replica_index))


def tiles_of(case: Case, *, room: int) -> Iterator[tuple[Share, Tile]]:
    """Tiles of up to ``room`` times the least one."""
    reads, spans = ReadMap(*case.ranks), case.spans()
    for share in reads.joined(case.replica_index):
        group = case.decode.ranks[share.reader].engine.group(share.group)
        least = position_bytes(share, group) // len(share.layers)
        for tile in cut_into_tiles(share, group, spans[share.group], tile_bytes=room * least):
            yield share, tile


def move_through_slots(
    case: Case,
    prefill: InMemory,
    decode: InMemory,
    *,
    room: int = 4,
    new_slot: Callable[[int], torch.Tensor],
    is_apart: bool = False,
) -> None:
    """Gather each tile, and scatter it.

    ``is_apart`` has slots on what torch takes for another device than the ranks'.
    """
    for share, tile in tiles_of(case, room=room):
        holder = prefill.paged(share.holder, share.group)
        readers = {rank: decode.paged(rank, share.group) for rank in share.readers}
        if is_apart:
            for memory in (holder, *readers.values()):
                if isinstance(memory.mover, GpuMover):
                    memory.mover.device = torch.device("cpu", 0)
        num_bytes = slot_bytes(holder.group, tile)
        whole = new_slot(num_bytes)
        slot = whole if prefill.as_gpu else whole.numpy()
        beyond = whole[num_bytes:].clone()

        holder.gather(case.prefill.tables[tile.group], tile, slot)
        for memory in readers.values():
            memory.scatter(case.decode.tables[tile.group], tile, slot)
        assert torch.equal(whole[num_bytes:], beyond)


def zero_what_is_moved(case: Case, decode: InMemory) -> None:
    """The positions of a fetch, in all that each rank has of each group."""
    for rank, placed in case.decode.ranks.items():
        for group in {region.group for region in placed.rank.regions}:
            table, span = case.decode.tables[group], case.spans()[group]
            decode.paged(rank, group).zero(table, *span)


def zeroed_by_loops(case: Case) -> bytes:
    after = bytearray(case.decode.memory)
    for placed in case.decode.ranks.values():
        for _, at, num_bytes in where_elements_lie(case.decode, placed, case.moved()):
            after[at : at + num_bytes] = bytes(num_bytes)
    return bytes(after)
