"""The blocks of one request on device and host, and exact copies of their token slots."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import anyio
import numpy as np
import torch

from kvbus.engine.bounce.pool import HOST_LAYOUT, HostTables
from kvbus.engine.offers import check_groups
from kvbus.engine.rank_memory import RankMemory, region_tensor
from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import BlockTable, EngineSpec, GroupSpec, num_blocks_for
from kvbus.geometry.blocks import BlockIds
from kvbus.planning import Spans

NO_BLOCKS = BlockTable(b"")


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """Copies of ``device_ids[i]`` with ``first_host_block + i``: slots [slots[0], slots[1])."""

    group: str
    device_ids: BlockIds
    first_host_block: int
    slots: tuple[int, int]


class RequestBlocks:
    """The device and host tables of each group; both start at the same block of the request.

    The host table covers the whole request; the device table may grow.
    """

    def __init__(
        self,
        engine: EngineSpec,
        host_tables: HostTables,
        device_tables: Mapping[str, BlockTable],
    ) -> None:
        self.engine, self.host_tables = engine, dict(host_tables)
        self._device_tables = dict(device_tables)

    def add(self, num_tokens: int, given: Mapping[str, BlockTable]) -> None:
        """Extend the device tables to ``num_tokens`` tokens; a state's block replaces the old one.

        Raises `GeometryError`, and then adds nothing.
        """
        check_groups(self.engine, given)
        self._device_tables = {
            group.name: self._with(group, given.get(group.name, NO_BLOCKS), num_tokens)
            for group in self.engine.groups
        }

    def on_host(self, start: int, stop: int) -> dict[str, BlockIds]:
        """Return the host blocks that tokens [start, stop) add."""
        return {
            group.name: self.host_tables[group.name][
                self._num_blocks(group, start) : self._num_blocks(group, stop)
            ]
            for group in self.engine.groups
        }

    def copies(self, spans: Spans) -> list[BlockCopy]:
        """Return the copies for these positions, without those before the tables."""
        return [
            copy
            for name, span in spans.items()
            for copy in _cut(
                self.engine.group(name), self._device_tables[name], self.host_tables[name], span
            )
        ]

    def _num_blocks(self, group: GroupSpec, num_tokens: int) -> int:
        first = self._device_tables[group.name].first_block
        return blocks_of(group, num_tokens, first=first)

    def _with(self, group: GroupSpec, new: BlockTable, num_tokens: int) -> BlockTable:
        known = self._device_tables[group.name]
        if group.state:
            if len(new) > 1:
                raise GeometryError(
                    f"a state has one block, {len(new)} are given for group '{group.name}'",
                    field="block_ids",
                )
            return BlockTable(new.ids or known.ids, known.first_block)
        table, size = BlockTable(known.ids + new.ids, known.first_block), group.block_size
        table.check_covers(known.first_block * size, num_tokens, size)
        return table


def _cut(
    group: GroupSpec, device_table: BlockTable, host_ids: BlockIds, span: tuple[int, int]
) -> Iterator[BlockCopy]:
    """Cut positions [span) into copies: of one partial block, or of consecutive whole ones."""
    device_ids, size = device_table.array(), group.block_size
    start, stop = max(span[0], device_table.first_block * size), span[1]
    while start < stop:
        block, slot = divmod(start, size)
        at = block - device_table.first_block
        if slot or stop - start < size:
            end, num_blocks = min(stop, (block + 1) * size), 1
            slots = slot, end - block * size
        else:
            num_blocks = _run_length(host_ids[at : at + (stop - start) // size])
            end, slots = start + num_blocks * size, (0, size)
        yield BlockCopy(group.name, device_ids[at : at + num_blocks], int(host_ids[at]), slots)
        start = end


def _run_length(ids: BlockIds) -> int:
    breaks = np.flatnonzero(np.diff(ids.astype(np.int64)) != 1)
    return int(breaks[0]) + 1 if breaks.size else len(ids)


def blocks_of(group: GroupSpec, num_tokens: int, *, first: int) -> int:
    """Count the blocks from ``first`` on that hold ``num_tokens`` tokens."""
    end = min(1, num_tokens) if group.state else num_blocks_for(num_tokens, group.block_size)
    return max(0, end - first)


class Direction(StrEnum):
    SAVE = "save"
    """Device to host."""

    LOAD = "load"
    """Host to device."""


@dataclass(frozen=True, slots=True, eq=False)
class HostBlocks:
    """Blocks of one group on one rank's device, for some ``layers`` and ``parts``.

    ``slots`` are token slots [slots[0], slots[1]) of each block. ``ids`` are the engine's, uint32.
    """

    rank: int
    group: str
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    ids: BlockIds
    slots: tuple[int, int]


CopyBlocks = Callable[[HostBlocks, torch.Tensor, Direction], None]
"""The engine's function: copies between device blocks and a view of host blocks.

The view is [block, layer, part, token, head, dim] of the blocks, in the group's dtype. Its blocks
are consecutive, and whole ones contiguous. Runs in a thread; the copy must be complete at the
return."""


class HostBuffer:
    """The host blocks of one rank; ``memory`` is for its `Link`.

    ``tensor`` has all of their bytes, so that the device can pin them.
    """

    def __init__(self, engine: EngineSpec, rank: int, num_blocks: Mapping[str, int]) -> None:
        """Allocate the blocks of a `HostPool`. Raises `SegmentError`."""
        self.memory = RankMemory.allocate(engine, rank, HOST_LAYOUT, num_blocks=num_blocks)
        self.rank, self.tensor = self.memory.rank, self.memory.tensor
        self._regions = [
            (region, region_tensor(engine, region, self.tensor)) for region in self.rank.regions
        ]

    def run(self, direction: Direction, copies: Iterable[BlockCopy], copy: CopyBlocks) -> None:
        """Call ``copy``, in this thread, for each part of ``copies`` on this rank."""
        for one in copies:
            stop = one.first_host_block + len(one.device_ids)
            for region, tensor in self._regions:
                if region.group != one.group:
                    continue
                blocks = HostBlocks(
                    rank=self.rank.rank,
                    group=one.group,
                    layers=region.layers,
                    parts=region.parts,
                    ids=one.device_ids,
                    slots=one.slots,
                )
                start, end = one.slots
                copy(blocks, tensor[one.first_host_block : stop, :, :, start:end], direction)


Copier = Callable[[Direction, Sequence[BlockCopy]], Awaitable[None]]
"""A function that runs copies on every rank until all are complete, and raises the error of a rank.

An engine with several processes writes its own, with `HostBuffer.run` in each worker. It is never
cancelled, and must not return during a copy."""


class LocalCopier:
    """Copies of all ranks in this process, one at a time, in a thread."""

    def __init__(self, buffers: Iterable[HostBuffer], copy: CopyBlocks) -> None:
        self._buffers, self._copy = tuple(buffers), copy
        self._limiter = anyio.CapacityLimiter(1)

    async def __call__(self, direction: Direction, copies: Sequence[BlockCopy]) -> None:
        """Raises errors of ``copy``; those outside `Exception` become `LocalError`."""
        await anyio.to_thread.run_sync(self._run, direction, copies, limiter=self._limiter)

    def _run(self, direction: Direction, copies: Sequence[BlockCopy]) -> None:
        try:
            for buffer in self._buffers:
                buffer.run(direction, copies, self._copy)
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            message = f"the engine's copy function ended with {type(error).__name__}: {error}"
            raise LocalError(message, code=ErrorCode.INTERNAL) from error
