"""What a handoff must have brought: the pattern, found again in the decode engine's views.

The planner is not trusted: what is compared are views and block ids alone, head by head.
Axes of a view: block, token, head, dim; axes of what is compared: token, word.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kvbus.bench.fill_pattern import WORD_BYTES, Words, fill, words_at
from kvbus.bench.shapes import DTYPE_BYTES, Blocks, PairedBlocks, Shape
from kvbus.engine import KvCache

RANK_WORDS = 1 << 40
"""The pattern of each rank goes on so far behind that of the one before; replicas have one."""


def all_words(cache: KvCache) -> Words:
    """The whole segment of a rank's cache."""
    region = cache.rank.regions[0]
    storage = cache.view(region.layers[0], region.parts[0]).untyped_storage()
    words: Words = torch.empty(0, dtype=torch.int64).set_(storage).numpy().view(np.uint64)
    return words


def fill_ranks(caches: Sequence[KvCache], shape: Shape) -> None:
    """Write the pattern to all ranks of a cache."""
    for rank, cache in enumerate(caches):
        fill(all_words(cache), first=_first_word(rank, shape))


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
    here, there = _slots(tables.decode, target, tables), _slots(tables.prefill, source, tables)
    return all(
        bool((_landed(cache, (layer, part, head), here) == expected).all())
        for cache in caches
        for region in cache.rank.regions
        for layer in region.layers
        for part in region.parts
        for head in range(region.first_head, region.first_head + region.num_heads)
        for expected in [_expected(holders, (layer, part, head), there, source)]
    )


HeadAt = tuple[int, str, int]
"""One head: layer, part, number."""


def _landed(cache: KvCache, cell: HeadAt, at: tuple[Blocks, Blocks]) -> Words:
    layer, part, head = cell
    blocks, slots = (torch.from_numpy(one) for one in at)
    rows = cache.view(layer, part)[blocks, slots, head - _first_head(cache)]
    words: Words = rows.contiguous().view(torch.int64).numpy().view(np.uint64)
    return words


def _expected(
    holders: Sequence[KvCache], cell: HeadAt, at: tuple[Blocks, Blocks], source: Shape
) -> Words:
    layer, part, head = cell
    holder = next(one for one in holders if 0 <= head - _first_head(one) < _num_heads(one))
    view, (blocks, slots) = holder.view(layer, part), at
    first = view.storage_offset() + (head - _first_head(holder)) * view.stride(2)
    starts = (first + blocks * view.stride(0) + slots * view.stride(1)) * DTYPE_BYTES // WORD_BYTES
    num_words = view.shape[3] * DTYPE_BYTES // WORD_BYTES
    rank_start = _first_word(holder.rank.rank, source)
    return words_at(rank_start + starts[:, None] + np.arange(num_words))


def _slots(blocks: Blocks, shape: Shape, tables: PairedBlocks) -> tuple[Blocks, Blocks]:
    """The block and the slot of each position."""
    positions = np.arange(tables.num_tokens)
    return blocks[positions // shape.block_size], positions % shape.block_size


def _first_head(cache: KvCache) -> int:
    return cache.rank.regions[0].first_head


def _num_heads(cache: KvCache) -> int:
    return cache.rank.regions[0].num_heads


def _first_word(rank: int, shape: Shape) -> int:
    return rank * RANK_WORDS if shape.num_kv_heads >= shape.tp_size else 0
