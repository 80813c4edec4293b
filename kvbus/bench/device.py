"""What stands for a device: private memory, copied to and from the ring block by block.

Refuses blocks of more than one piece, and parts of blocks: a copy here is one pass over the bytes.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kvbus.engine import KvCache
from kvbus.engine.bounce import CopyBlocks, Direction, HostBlocks
from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec, RankSpec


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
