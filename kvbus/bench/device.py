"""What stands for a device: private memory, copied to and from the ring block by block.

Refuses blocks of more than one piece, and parts of blocks: a copy here is one pass over the bytes.
"""

from collections.abc import Sequence

import torch

from kvbus.engine import KvCache
from kvbus.engine.host import CopyBlocks, Direction, HostBlocks
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
        device, slots = rows_of[blocks.rank], ring.reshape(len(ring), -1).view(torch.uint8)
        if slots.shape[1] != device.shape[1]:
            raise GeometryError("the benchmark's device copies whole blocks only")
        for number, block_id in enumerate(blocks.ids.tolist()):
            if direction is Direction.SAVE:
                slots[number].copy_(device[block_id])
            else:
                device[block_id].copy_(slots[number])

    return copy


def _rows(cache: KvCache) -> torch.Tensor:
    """The cache as bytes: [block, byte]."""
    (region,) = cache.rank.regions
    storage = cache.view(region.layers[0], region.parts[0]).untyped_storage()
    row_bytes = region.axes[0].stride_bytes
    every = torch.empty(0, dtype=torch.uint8).set_(storage)
    return every[: region.axes[0].size * row_bytes].view(-1, row_bytes)
