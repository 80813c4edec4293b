"""The caches of an engine: allocated, filled with a pattern, and compared with what must be there.

The planner is not trusted: what is compared are views and block ids alone. A device that no agent
maps is private memory of one rank, copied to and from a ring in whole blocks.

Axes
    block, slot, head   of the rank's cache; heads have their numbers in the model
    word                8 bytes of a head, or of a block
"""

from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvbus.bench.shapes import GROUP, PairedBlocks, Shape
from kvbus.engine import KvCache, MemorySession
from kvbus.engine.bounce import CopyBlocks, Direction, HostBlocks, HostBuffer, HostPool, LocalCopier
from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec

Ring = tuple[HostPool, LocalCopier]

ATTACH_TIMEOUT_S = 30.0
WORD_BYTES = 8
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


async def open_caches(
    stack: AsyncExitStack, attach_path: str | Path, spec: EngineSpec, shape: Shape, num_blocks: int
) -> tuple[list[KvCache], Ring | None]:
    """The caches of all ranks, until ``stack`` is closed, and the ring of those that have one.

    A ring has half the blocks: the requests of the benchmark use every other one.
    """
    sessions = [
        await stack.enter_async_context(
            MemorySession(attach_path, spec, rank, attach_timeout_s=ATTACH_TIMEOUT_S)
        )
        for rank in range(spec.num_ranks)
    ]
    if not shape.host:
        return [await one.allocate(shape.layout, num_blocks=num_blocks) for one in sessions], None
    torch.set_num_threads(1)  # else each block's copy waits for another thread to be woken
    ring = HostPool({GROUP: max(1, num_blocks // 2)})
    buffers = [HostBuffer(spec, one.rank, ring.num_blocks) for one in sessions]
    for one, buffer in zip(sessions, buffers, strict=True):
        await one.keep(buffer.memory)
    (rank,), device = shape.ranks(num_blocks), device_blocks(shape, num_blocks)
    cache = KvCache(spec, rank, device.flatten().view(torch.uint8))
    return [cache], (ring, LocalCopier(buffers, block_copy(device)))


def device_blocks(shape: Shape, num_blocks: int) -> Tensor:
    """Memory of this process alone, its pages present: [block, word]."""
    return torch.empty(num_blocks, shape.block_bytes // WORD_BYTES, dtype=torch.int64).zero_()


def block_copy(device: Tensor) -> CopyBlocks:
    """Copies whole blocks of ``device``."""

    def copy(blocks: HostBlocks, ring: Tensor, direction: Direction) -> None:
        slots = ring.reshape(len(ring), -1).view(torch.int64)
        if slots.shape[1] != device.shape[1]:
            raise GeometryError("the benchmark's device copies whole blocks only")
        ids = torch.from_numpy(blocks.ids.astype(np.int64))
        if direction is Direction.SAVE:
            torch.index_select(device, 0, ids, out=slots)
        else:
            torch._foreach_copy_([device[block_id] for block_id in ids.tolist()], list(slots))

    return copy


def fill(caches: Sequence[KvCache]) -> None:
    """Write the pattern to all ranks of a cache."""
    for number, heads, words in _parts(caches):
        blocks, slots = (torch.arange(size) for size in words.shape[:2])
        words.copy_(_pattern(number, blocks[:, None], slots, heads=heads, num=words.shape[3]))


def wipe(caches: Sequence[KvCache]) -> None:
    """Zero a cache, so that old bytes cannot pass for new ones."""
    for _, _, words in _parts(caches):
        words.zero_()


def arrived(caches: Sequence[KvCache], tables: PairedBlocks, *, source_block_size: int) -> bool:
    """Whether the tokens of ``tables`` in ``caches`` are those of a cache that was filled."""
    positions = torch.arange(tables.num_tokens)
    prefill, decode = torch.from_numpy(tables.prefill), torch.from_numpy(tables.decode)
    blocks, slots = prefill[positions // source_block_size], positions % source_block_size
    return all(
        torch.equal(
            words[decode[positions // words.shape[1]], positions % words.shape[1]],
            _pattern(number, blocks, slots, heads=heads, num=words.shape[3]),
        )
        for number, heads, words in _parts(caches)
    )


def _parts(caches: Sequence[KvCache]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """A number, the heads and the words [block, slot, head, word] of each part of each layer."""
    for cache in caches:
        for region in cache.rank.regions:
            heads = torch.arange(region.first_head, region.first_head + region.num_heads)
            for layer, (at, part) in product(region.layers, enumerate(region.parts)):
                yield layer << 1 | at, heads, cache.view(layer, part).view(torch.int64)


def _pattern(number: int, blocks: Tensor, slots: Tensor, *, heads: Tensor, num: int) -> Tensor:
    """[..., head, word]: what belongs into these slots, no two words of a model alike."""
    rows = ((number << 24 | blocks) << 8 | slots)[..., None, None]
    numbers = rows << 16 | heads[:, None] << 8 | torch.arange(num)
    return numbers.add_(1).mul_(_FACTOR)
