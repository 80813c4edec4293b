"""Copies of tiles between blocks and staging slots, checked before any byte moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Protocol

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

if TYPE_CHECKING:
    import torch

    Buffer = npt.NDArray[np.uint8] | torch.Tensor
    """One row of bytes: on the host, or on a GPU."""

RunsAt = Callable[[int], Runs]
MAX_PLANS = 256
"""Per group and rank, about 20 KB each. Readers choose their tiles."""


class Mover(Protocol):
    def move(self, content: Buffer, runs_at: RunsAt, *, into_slot: bool) -> None: ...

    def zero(self, runs: Runs) -> None: ...


class PagedMemory:
    """Thread-safe. ``regions`` must have passed `validate_rank`. Raises `GeometryError`."""

    def __init__(
        self,
        group: GroupSpec,
        regions: Iterable[Region],
        buffers: Mapping[str, Buffer],
        *,
        mover: Mover | None = None,
    ) -> None:
        own = tuple(region for region in regions if region.group == group.name)
        for region in own:
            _check_extent(region, DTYPE_SIZES_BYTES[group.dtype], buffers)
        self.group, self.mover = group, mover
        self._own = {region.segment_id: buffers[region.segment_id] for region in own}
        self._num_blocks = min((region.size(AxisName.BLOCK) for region in own), default=0)
        engine = EngineSpec("rank", "rank", 1, (group,))
        addresses = {name: _address_of(buffer) for name, buffer in self._own.items()}
        self._placed = PlacedRank(engine, RankSpec(0, (), own), addresses)
        self._plan = lru_cache(MAX_PLANS)(partial(SlotPlan, self._placed))

    def gather(self, table: BlockTable, tile: Tile, slot: Buffer) -> None:
        """Copy to the start of ``slot``, which may be larger. Raises `GeometryError`."""
        self._move(table, tile, slot, into_slot=True)

    def scatter(self, table: BlockTable, tile: Tile, slot: Buffer) -> None:
        self._move(table, tile, slot, into_slot=False)

    def _move(self, table: BlockTable, tile: Tile, slot: Buffer, *, into_slot: bool) -> None:
        if tile.group != self.group.name:
            message = f"tile of group '{tile.group}', not '{self.group.name}'"
            raise GeometryError(message, field="group")
        self._check_blocks(table, tile.start, tile.stop)
        shape = msgspec.structs.replace(tile, start=0, stop=tile.stop - tile.start)
        plan = self._plan(shape, into_slot=into_slot)
        needed, room = slot_bytes(self.group, tile), len(slot)
        if needed > room:
            raise GeometryError(
                f"tile takes {needed} bytes, its staging slot has {room}",
                needed_bytes=needed,
                given_bytes=room,
            )

        def runs_at(address: int) -> Runs:
            return plan.runs(table, tile.start, tile.stop, slot_at=address)

        if self.mover is None:
            copy_runs(runs_at(_address_of(slot)))
        else:
            self.mover.move(slot[:needed], runs_at, into_slot=into_slot)

    def zero(self, table: BlockTable, start: int, stop: int) -> None:
        self._check_blocks(table, start, stop)
        tables = {self.group.name: table}
        runs = self._whole.runs(tables, tables, {self.group.name: (start, stop)})
        (self.mover.zero if self.mover else zero_runs)(runs)

    @cached_property
    def _whole(self) -> RunPlan:
        # Each region moves onto itself: regions of one group share no bytes.
        shares = map(Share.whole, self._placed.rank.regions)
        return RunPlan({0: self._placed}, {0: self._placed}, shares)

    def _check_blocks(self, table: BlockTable, start: int, stop: int) -> None:
        check_readable(self.group, table, (start, stop), num_blocks=self._num_blocks)


def _address_of(buffer: Buffer) -> int:
    return buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data_ptr()


def _check_extent(region: Region, itemsize: int, buffers: Mapping[str, Buffer]) -> None:
    given_bytes = len(buffers[region.segment_id]) if region.segment_id in buffers else 0
    last_element = sum((axis.size - 1) * axis.stride_bytes for axis in region.axes)
    needed_bytes = region.offset_bytes + last_element + itemsize
    if needed_bytes > given_bytes:
        raise GeometryError(
            f"a region of group '{region.group}' ends at byte {needed_bytes} of segment "
            f"'{region.segment_id}', which has {given_bytes}",
            needed_bytes=needed_bytes,
            given_bytes=given_bytes,
        )
