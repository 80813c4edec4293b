"""The host blocks of ranks, in memory that the agent maps, and the calls of the engine's function.

Refuses to end before what was started has: a thread that copies cannot be stopped.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import anyio
import torch

from kvbus.engine.bounce.request_blocks import BlockCopy
from kvbus.engine.bounce.sizing import HOST_LAYOUT
from kvbus.engine.rank_memory import RankMemory
from kvbus.engine.region_tensor import region_tensor
from kvbus.errors import ErrorCode, LocalError
from kvbus.geometry import EngineSpec
from kvbus.geometry.blocks import BlockIds


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
    """For an engine whose ranks are in this process; at most ``num_threads`` copy at once."""

    def __init__(
        self, buffers: Iterable[HostBuffer], copy: CopyBlocks, *, num_threads: int = 1
    ) -> None:
        self._buffers, self._copy = tuple(buffers), copy
        self._limiter = anyio.CapacityLimiter(num_threads)

    async def __call__(self, direction: Direction, copies: Sequence[BlockCopy]) -> None:
        """Each rank in a thread of its own, as far as there are threads.

        Raises what a rank's copy raised; as a `LocalError` what is no `Exception`.
        """
        failures: list[BaseException] = []

        def run(buffer: HostBuffer) -> None:
            try:
                buffer.run(direction, copies, self._copy)
            except BaseException as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            for buffer in self._buffers:
                tasks.start_soon(
                    partial(anyio.to_thread.run_sync, run, buffer, limiter=self._limiter)
                )
        for failure in failures:
            if isinstance(failure, Exception):
                raise failure
            message = f"the engine's copy function ended with {type(failure).__name__}: {failure}"
            raise LocalError(message, code=ErrorCode.INTERNAL) from failure
