"""Copies of tiles between blocks and staging slots, checked before any byte moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache, partial
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvbus.errors import GeometryError
from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    AxisName,
    BlockTable,
    EngineSpec,
    GroupSpec,
    RankSpec,
    Region,
    Tile,
    check_readable,
    slot_bytes,
)
from kvbus.memory.run_copy import copy_runs, zero_runs
from kvbus.planning import PlacedRank, RunPlan, Runs, Share, SlotPlan

MAX_PLANS = 256
"""Per group and rank, about 20 KB each. Readers choose their tiles."""


class ByteRange(NamedTuple):
    """Bytes on the host or on a GPU."""

    address: int
    size_bytes: int

    @classmethod
    def of(cls, row: npt.NDArray[np.uint8]) -> ByteRange:
        return cls(row.ctypes.data, len(row))


class Mover(Protocol):
    def copy(self, runs: Runs) -> None: ...

    def zero(self, runs: Runs) -> None:
        """Zero the targets."""


class HostMover:
    def copy(self, runs: Runs) -> None:
        copy_runs(runs)

    def zero(self, runs: Runs) -> None:
        zero_runs(runs)


class PagedMemory:
    """Thread-safe. ``regions`` must have passed `validate_rank`. Raises `GeometryError`."""

    def __init__(
        self,
        group: GroupSpec,
        regions: Iterable[Region],
        segments: Mapping[str, ByteRange],
        mover: Mover = HostMover(),  # noqa: B008 - it has no state
    ) -> None:
        own = tuple(region for region in regions if region.group == group.name)
        for region in own:
            _check_extent(region, DTYPE_SIZES_BYTES[group.dtype], segments)
        self.group, self._mover = group, mover
        self._num_blocks = min((region.size(AxisName.BLOCK) for region in own), default=0)
        engine = EngineSpec("rank", "rank", 1, (group,))
        addresses = {one.segment_id: segments[one.segment_id].address for one in own}
        self._placed = PlacedRank(engine, RankSpec(0, (), own), addresses)
        self._plan = lru_cache(MAX_PLANS)(partial(SlotPlan, self._placed))

    def gather(self, table: BlockTable, tile: Tile, slot: ByteRange) -> None:
        """Copy to the start of ``slot``, which may be larger. Raises `GeometryError`."""
        self._move(table, tile, slot, into_slot=True)

    def scatter(self, table: BlockTable, tile: Tile, slot: ByteRange) -> None:
        self._move(table, tile, slot, into_slot=False)

    def _move(self, table: BlockTable, tile: Tile, slot: ByteRange, *, into_slot: bool) -> None:
        if tile.group != self.group.name:
            message = f"tile of group '{tile.group}', not '{self.group.name}'"
            raise GeometryError(message, field="group")
        self._check_blocks(table, tile.start, tile.stop)
        shape = msgspec.structs.replace(tile, start=0, stop=tile.stop - tile.start)
        plan = self._plan(shape, into_slot=into_slot)
        needed, room = slot_bytes(self.group, tile), slot.size_bytes
        if needed > room:
            raise GeometryError(
                f"tile takes {needed} bytes, its staging slot has {room}",
                needed_bytes=needed,
                given_bytes=room,
            )

        self._mover.copy(plan.runs(table, tile.start, tile.stop, slot_at=slot.address))

    def zero(self, table: BlockTable, start: int, stop: int) -> None:
        self._check_blocks(table, start, stop)
        tables = {self.group.name: table}
        runs = self._whole.runs(tables, tables, {self.group.name: (start, stop)})
        self._mover.zero(runs)

    @cached_property
    def _whole(self) -> RunPlan:
        # Each region moves onto itself: regions of one group share no bytes.
        shares = map(Share.whole, self._placed.rank.regions)
        return RunPlan({0: self._placed}, {0: self._placed}, shares)

    def _check_blocks(self, table: BlockTable, start: int, stop: int) -> None:
        check_readable(self.group, table, (start, stop), num_blocks=self._num_blocks)


def _check_extent(region: Region, itemsize: int, segments: Mapping[str, ByteRange]) -> None:
    given_bytes = segments.get(region.segment_id, ByteRange(0, 0)).size_bytes
    last_element = sum((axis.size - 1) * axis.stride_bytes for axis in region.axes)
    needed_bytes = region.offset_bytes + last_element + itemsize
    if needed_bytes > given_bytes:
        raise GeometryError(
            f"a region of group '{region.group}' ends at byte {needed_bytes} of segment "
            f"'{region.segment_id}', which has {given_bytes}",
            needed_bytes=needed_bytes,
            given_bytes=given_bytes,
        )
