"""What stands for a device: a cache that no agent can map, and the copies between it and the ring.

A real engine copies with its device's own means.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvbus.engine import KvCache
from kvbus.engine.bounce import CopyBlocks, Direction, HostBlocks
from kvbus.geometry import EngineSpec, KvLayout, lay_out_rank


def private_cache(
    spec: EngineSpec, rank: int, layout: KvLayout, num_blocks: int | Mapping[str, int]
) -> KvCache:
    """A rank's cache in memory of this process alone."""
    described = lay_out_rank(spec, rank, layout, num_blocks=num_blocks)
    size_bytes = described.segments[0].size_bytes
    return KvCache(spec, described, torch.zeros(size_bytes, dtype=torch.uint8))


def device_copy(caches: Sequence[KvCache]) -> CopyBlocks:
    """Copies between the ranks' ``caches`` and the ring, layer by layer."""

    def copy(blocks: HostBlocks, ring: torch.Tensor, direction: Direction) -> None:
        ids, (start, stop) = torch.from_numpy(blocks.ids.astype(np.int64)), blocks.slots
        for number, layer in enumerate(blocks.layers):
            for at, part in enumerate(blocks.parts):
                device = caches[blocks.rank].view(layer, part)[:, start:stop]
                if direction is Direction.SAVE:
                    ring[:, number, at] = device[ids]
                else:
                    device[ids] = ring[:, number, at]

    return copy
