"""The sides of a drawn handoff in real memory, and all of it moved through staging slots."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from kvbus.geometry import Tile, slot_bytes
from kvbus.memory.copying import ByteRange, HostMover, Mover, PagedMemory
from kvbus.planning import PlacedRank, ReadMap, RunPlan, Share, cut_into_tiles, position_bytes
from tests.unit.planning.handoffs import Case, Side, where_elements_lie


class Room(Protocol):
    """Bytes somewhere, at ``address``."""

    address: int

    def content(self) -> bytes: ...


class HostRoom:
    def __init__(self, content: bytes, *, offset_bytes: int = 0) -> None:
        whole = np.frombuffer(bytearray(offset_bytes) + content, np.uint8)
        self._bytes = whole[offset_bytes:]
        self.address: int = self._bytes.ctypes.data

    def content(self) -> bytes:
        return self._bytes.tobytes()


class InMemory:
    """One side of a handoff; ``content`` is that of its memory, by default what was drawn."""

    def __init__(
        self,
        side: Side,
        content: bytes = b"",
        *,
        room: Callable[[bytes], Room] = HostRoom,
        mover: Mover = HostMover(),  # noqa: B008 - it has no state
    ) -> None:
        self.side, self._mover = side, mover
        self._room = room(content or side.memory)

    def content(self) -> bytes:
        return self._room.content()

    def placed(self, rank: int) -> PlacedRank:
        placed, moved = self.side.ranks[rank], self._room.address - self.side.base
        return replace(placed, addresses={n: at + moved for n, at in placed.addresses.items()})

    def paged(self, rank: int, group: str) -> PagedMemory:
        placed = self.placed(rank)
        segments = {
            segment.segment_id: ByteRange(placed.addresses[segment.segment_id], segment.size_bytes)
            for segment in placed.rank.segments
        }
        spec, regions = placed.engine.group(group), placed.rank.regions
        return PagedMemory(spec, regions, segments, self._mover)


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
    new_slot: Callable[[bytes], Room] = HostRoom,
) -> None:
    """Gather each tile, and scatter it."""
    for share, tile in tiles_of(case, room=room):
        holder = prefill.paged(share.holder, share.group)
        readers = {rank: decode.paged(rank, share.group) for rank in share.readers}
        num_bytes = slot_bytes(holder.group, tile)
        slot = new_slot(bytes(num_bytes + 5))
        there = ByteRange(slot.address, num_bytes + 5)

        holder.gather(case.prefill.tables[tile.group], tile, there)
        for memory in readers.values():
            memory.scatter(case.decode.tables[tile.group], tile, there)
        assert not any(slot.content()[num_bytes:])


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
