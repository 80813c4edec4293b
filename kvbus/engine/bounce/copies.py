"""The blocks of one request in both places, and the copies between them that the engine makes.

A block that is filled partly is copied partly: slots outside of a span are not touched.
"""

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
    """Device block ``device_ids[i]`` and host block ``first_host_block + i``, all alike.

    Of each block, token slots [slots[0], slots[1]).
    """

    group: str
    device_ids: BlockIds
    first_host_block: int
    slots: tuple[int, int]


class RequestBlocks:
    """Two tables for each group, that of the device and that of the host.

    Both start at the same block of the request. The device's may grow; the host's are those of the
    whole request from the beginning.
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
        """More blocks of the device, by group: with them there are those of ``num_tokens`` tokens.

        Of a state, its block, in place of what it was. Raises `GeometryError`, and adds none.
        """
        check_groups(self.engine, given)
        self._device_tables = {
            group.name: self._with(group, given.get(group.name, NO_BLOCKS), num_tokens)
            for group in self.engine.groups
        }

    def on_host(self, start: int, stop: int) -> dict[str, BlockIds]:
        """The host blocks that tokens up to ``stop`` need, and those up to ``start`` do not."""
        return {
            group.name: self.host_tables[group.name][
                self._num_blocks(group, start) : self._num_blocks(group, stop)
            ]
            for group in self.engine.groups
        }

    def copies(self, spans: Spans) -> list[BlockCopy]:
        """What to copy for these positions, by group; those in front of the tables are left out."""
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
    """The copies of positions [span) of one group; both tables start at the same block.

    A copy is of blocks whose host blocks follow each other and are copied whole, or of one block
    that is not.
    """
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
    """How many ids from the first on follow each other."""
    breaks = np.flatnonzero(np.diff(ids.astype(np.int64)) != 1)
    return int(breaks[0]) + 1 if breaks.size else len(ids)


def blocks_of(group: GroupSpec, num_tokens: int, *, first: int) -> int:
    """Blocks, from ``first`` on, that the first ``num_tokens`` tokens of a request occupy."""
    end = min(1, num_tokens) if group.state else num_blocks_for(num_tokens, group.block_size)
    return max(0, end - first)


class Direction(StrEnum):
    """Which way blocks are copied."""

    SAVE = "save"
    """From the device into host blocks."""

    LOAD = "load"
    """From host blocks to the device."""


@dataclass(frozen=True, slots=True, eq=False)
class HostBlocks:
    """Blocks of one group on one rank's device; ``ids`` are the engine's, uint32.

    Of each, the token slots [slots[0], slots[1]) of ``layers`` and ``parts``.
    """

    rank: int
    group: str
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    ids: BlockIds
    slots: tuple[int, int]


CopyBlocks = Callable[[HostBlocks, torch.Tensor, Direction], None]
"""The engine's function: copies between ``blocks`` on its device and a view of host blocks.

The view is [block, layer, part, token, head, dim] as ``blocks`` lists them, in the group's dtype;
its blocks follow each other, and whole ones are one piece of memory. Called in a thread, and done
when it returns.
"""


class HostBuffer:
    """The host blocks of one rank; ``memory`` is for its `Link`.

    ``tensor`` is all of their bytes, should the device pin them.
    """

    def __init__(self, engine: EngineSpec, rank: int, num_blocks: Mapping[str, int]) -> None:
        """``num_blocks`` are those of the `HostPool`. Raises `SegmentError`."""
        self.memory = RankMemory.allocate(engine, rank, HOST_LAYOUT, num_blocks=num_blocks)
        self.rank, self.tensor = self.memory.rank, self.memory.tensor
        self._regions = [
            (region, region_tensor(engine, region, self.tensor)) for region in self.rank.regions
        ]

    def run(self, direction: Direction, copies: Iterable[BlockCopy], copy: CopyBlocks) -> None:
        """Call ``copy`` for each of ``copies`` that this rank has a part of; in this thread."""
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
"""Copies on every rank, and returns when all have; raises what a rank's copy raised.

An engine of several processes has one of its own, which has each worker call `HostBuffer.run`.
It is never cancelled, and must not end while a copy goes on.
"""


class LocalCopier:
    """For an engine whose ranks are in this process: copies one after the other, in a thread."""

    def __init__(self, buffers: Iterable[HostBuffer], copy: CopyBlocks) -> None:
        self._buffers, self._copy = tuple(buffers), copy
        self._limiter = anyio.CapacityLimiter(1)

    async def __call__(self, direction: Direction, copies: Sequence[BlockCopy]) -> None:
        """Raises what ``copy`` raised; as a `LocalError` what is no `Exception`."""
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
