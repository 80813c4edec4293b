"""The ranks of an engine: sessions, caches, and what stands for a device that no agent maps.

Such a device is private memory, copied to and from the ring in whole blocks.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvbus.bench.shapes import GROUP, Shape
from kvbus.engine import KvCache, MemorySession
from kvbus.engine.bounce import CopyBlocks, Direction, HostBlocks, HostPool, LocalCopier
from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec, RankSpec
from kvbus.memory.threads import copy_on_one_thread

ATTACH_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """The caches of all ranks; ``ring`` is what they go through when they are private memory."""

    caches: list[KvCache]
    ring: tuple[HostPool, LocalCopier] | None = None


async def open_ranks(
    stack: AsyncExitStack, attach_path: str | Path, spec: EngineSpec, shape: Shape, num_blocks: int
) -> Ranks:
    """The caches of all ranks, each of ``num_blocks`` blocks, until ``stack`` is closed.

    A ring has half of that: the requests of the benchmark use every other block.
    """
    sessions = [
        await stack.enter_async_context(
            MemorySession(attach_path, spec, rank, attach_timeout_s=ATTACH_TIMEOUT_S)
        )
        for rank in range(spec.num_ranks)
    ]
    if not shape.host:
        return Ranks([await one.allocate(shape.layout, num_blocks=num_blocks) for one in sessions])
    copy_on_one_thread()  # else each block's copy waits for another thread to be woken
    ring = HostPool({GROUP: max(1, num_blocks // 2)})
    buffers = [await one.allocate_ring(ring.num_blocks) for one in sessions]
    caches = [private_cache(spec, rank) for rank in shape.ranks(num_blocks)]
    return Ranks(caches, (ring, LocalCopier(buffers, block_copy(caches))))


def private_cache(spec: EngineSpec, rank: RankSpec) -> KvCache:
    """A rank's cache in memory of this process alone, its pages present."""
    buffer = torch.empty(rank.segments[0].size_bytes, dtype=torch.uint8)
    return KvCache(spec, rank, buffer.zero_())


def block_copy(caches: Sequence[KvCache]) -> CopyBlocks:
    """Copies whole blocks of caches whose layers lie in one region."""
    rows_of = [_rows(cache) for cache in caches]

    def copy(blocks: HostBlocks, ring: torch.Tensor, direction: Direction) -> None:
        device, slots = rows_of[blocks.rank], ring.reshape(len(ring), -1).view(torch.int64)
        if slots.shape[1] != device.shape[1]:
            raise GeometryError("the benchmark's device copies whole blocks only")
        ids = torch.from_numpy(blocks.ids.astype(np.int64))
        if direction is Direction.SAVE:
            torch.index_select(device, 0, ids, out=slots)
        else:
            torch._foreach_copy_([device[block_id] for block_id in ids.tolist()], list(slots))

    return copy


def _rows(cache: KvCache) -> torch.Tensor:
    """The cache as words of 8 bytes: [block, word]."""
    (region,) = cache.rank.regions
    storage = cache.view(region.layers[0], region.parts[0]).untyped_storage()
    row_words = region.axes[0].stride_bytes // 8
    every = torch.empty(0, dtype=torch.int64).set_(storage)
    return every[: region.axes[0].size * row_words].view(-1, row_words)
