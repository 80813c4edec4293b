"""The caches of an engine: allocated, filled with a pattern, and compared with what must be there.

The planner is not trusted: what is compared are views and block ids alone, head by head. A device
that no agent maps is private memory, copied to and from a ring in whole blocks.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvbus.bench.shapes import DTYPE_BYTES, GROUP, Blocks, PairedBlocks, Shape
from kvbus.engine import KvCache, MemorySession
from kvbus.engine.bounce import CopyBlocks, Direction, HostBlocks, HostPool, LocalCopier
from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec, RankSpec
from kvbus.memory.threads import copy_on_one_thread

Words = npt.NDArray[np.uint64]
Ring = tuple[HostPool, LocalCopier]

ATTACH_TIMEOUT_S = 30.0
WORD_BYTES = 8
RANK_WORDS = 1 << 40
"""The pattern of each rank goes on so far behind that of the one before; replicas have one."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_STEP_WORDS = 1 << 20


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
    copy_on_one_thread()  # else each block's copy waits for another thread to be woken
    ring = HostPool({GROUP: max(1, num_blocks // 2)})
    buffers = [await one.allocate_ring(ring.num_blocks) for one in sessions]
    caches = [private_cache(spec, rank) for rank in shape.ranks(num_blocks)]
    return caches, (ring, LocalCopier(buffers, block_copy(caches)))


def private_cache(spec: EngineSpec, rank: RankSpec) -> KvCache:
    """A rank's cache in memory of this process alone, its pages present."""
    buffer = torch.empty(rank.segments[0].size_bytes, dtype=torch.uint8)
    return KvCache(spec, rank, buffer.zero_())


def block_copy(caches: Sequence[KvCache]) -> CopyBlocks:
    """Copies whole blocks of caches whose layers lie in one region."""
    rows_of = [_block_rows(cache) for cache in caches]

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


def _block_rows(cache: KvCache) -> torch.Tensor:
    """The cache as words of 8 bytes: [block, word]."""
    (region,) = cache.rank.regions
    num_blocks, row_words = region.axes[0].size, region.axes[0].stride_bytes // WORD_BYTES
    return _storage_words(cache)[: num_blocks * row_words].view(-1, row_words)


def _storage_words(cache: KvCache) -> torch.Tensor:
    region = cache.rank.regions[0]
    storage = cache.view(region.layers[0], region.parts[0]).untyped_storage()
    return torch.empty(0, dtype=torch.int64).set_(storage)


def all_words(cache: KvCache) -> Words:
    """The whole segment of a rank's cache."""
    words: Words = _storage_words(cache).numpy().view(np.uint64)
    return words


def fill_ranks(caches: Sequence[KvCache], shape: Shape) -> None:
    """Write the pattern to all ranks of a cache."""
    for rank, cache in enumerate(caches):
        words, first = all_words(cache), _first_word(rank, shape)
        for start in range(0, len(words), _STEP_WORDS):
            stop = min(start + _STEP_WORDS, len(words))
            words[start:stop] = _pattern(np.arange(first + start, first + stop))


def wipe(caches: Sequence[KvCache]) -> None:
    """Zero a cache, so that old bytes cannot pass for new ones."""
    for cache in caches:
        all_words(cache)[:] = 0


def arrived(
    caches: Sequence[KvCache],
    target: Shape,
    source: Shape,
    tables: PairedBlocks,
    *,
    num_source_blocks: int,
) -> bool:
    """Whether the tokens of ``tables`` in ``caches`` are those of a filled cache of ``source``."""
    spec = source.spec("source")
    holders = [  # memory that is never touched: only its views are asked where things lie
        KvCache(spec, rank, torch.empty(rank.segments[0].size_bytes, dtype=torch.uint8))
        for rank in source.ranks(num_source_blocks)
    ]
    positions = np.arange(tables.num_tokens)
    here = tables.decode[positions // target.block_size], positions % target.block_size
    there = tables.prefill[positions // source.block_size], positions % source.block_size

    def has_landed(cache: KvCache, layer: int, part: str, head: int) -> bool:
        holder = next(one for one in holders if head in _heads(one))
        start = _first_word(holder.rank.rank, source)
        expected = _pattern(start + _word_numbers(holder, layer, part, head, there))
        landed = all_words(cache)[_word_numbers(cache, layer, part, head, here)]
        return bool((landed == expected).all())

    return all(
        has_landed(cache, layer, part, head)
        for cache in caches
        for region in cache.rank.regions
        for layer in region.layers
        for part in region.parts
        for head in _heads(cache)
    )


def _word_numbers(
    cache: KvCache, layer: int, part: str, head: int, at: tuple[Blocks, Blocks]
) -> npt.NDArray[np.int64]:
    """Where the words of one head lie in the segment of its rank: [token, word]."""
    view, (blocks, slots) = cache.view(layer, part), at
    first = view.storage_offset() + (head - _heads(cache).start) * view.stride(2)
    starts = (first + blocks * view.stride(0) + slots * view.stride(1)) * DTYPE_BYTES // WORD_BYTES
    return starts[:, None] + np.arange(view.shape[3] * DTYPE_BYTES // WORD_BYTES)


def _heads(cache: KvCache) -> range:
    region = cache.rank.regions[0]
    return range(region.first_head, region.first_head + region.num_heads)


def _pattern(positions: npt.NDArray[Any]) -> Words:
    """The words that belong at these positions: each is made from its own."""
    return (positions.astype(np.uint64) + np.uint64(1)) * _FACTOR


def _first_word(rank: int, shape: Shape) -> int:
    return rank * RANK_WORDS if shape.num_kv_heads >= shape.tp_size else 0
