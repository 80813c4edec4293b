"""What a handoff must have brought: the pattern, found again in the decode engine's views.

Refuses to trust the planner: it looks at regions, views and block ids alone, head by head.

Axes of a view: block, token, head, dim; axes of what is compared: token, word.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvbus.bench.shapes import Blocks, Shape, Tables
from kvbus.bench.words import WORD_BYTES, Words, fill, words_at
from kvbus.engine import KvCache
from kvbus.geometry import AxisName, RankSpec, Region

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
    tables: Tables,
    *,
    num_source_blocks: int,
) -> bool:
    """Whether the tokens of ``tables`` in ``caches`` are those of a filled cache of ``source``."""
    holders = source.ranks(num_source_blocks)
    return all(
        _head_arrived(cache, region, place, _holder(holders, place[2]), (target, source, tables))
        for cache in caches
        for region in cache.rank.regions
        for place in _places(region)
    )


Place = tuple[int, str, int]
"""Layer, part, head."""


def _head_arrived(
    cache: KvCache,
    region: Region,
    place: Place,
    holder: RankSpec,
    request: tuple[Shape, Shape, Tables],
) -> bool:
    target, source, tables = request
    layer, part, head = place
    positions = np.arange(tables.num_tokens)
    view = cache.view(layer, part)
    blocks, slots = _slots(tables.decode, positions, target)
    rows = view[torch.from_numpy(blocks), torch.from_numpy(slots), head - region.first_head]
    got = rows.contiguous().view(torch.int64).numpy().view(np.uint64)
    origin = next(r for r in holder.regions if layer in r.layers and part in r.parts)
    first_bytes = _offset_bytes(origin, place)
    for axis, index in zip(
        (AxisName.BLOCK, AxisName.TOKEN), _slots(tables.prefill, positions, source), strict=True
    ):
        first_bytes = first_bytes + index * origin.stride_bytes(axis)
    words = first_bytes[:, None] // WORD_BYTES + np.arange(got.shape[1])
    return bool((got == words_at(words + _first_word(holder.rank, source))).all())


def _places(region: Region) -> list[Place]:
    heads = range(region.first_head, region.first_head + region.num_heads)
    return [(layer, part, h) for layer in region.layers for part in region.parts for h in heads]


def _slots(blocks: Blocks, positions: Blocks, shape: Shape) -> tuple[Blocks, Blocks]:
    return blocks[positions // shape.block_size], positions % shape.block_size


def _offset_bytes(region: Region, place: Place) -> npt.NDArray[np.int64]:
    layer, part, head = place
    steps = {
        AxisName.LAYER: region.layers.index(layer),
        AxisName.KV: region.parts.index(part),
        AxisName.HEAD: head - region.first_head,
    }
    moved = sum(index * region.stride_bytes(axis) for axis, index in steps.items())
    return np.array(region.offset_bytes + moved)


def _holder(ranks: Sequence[RankSpec], head: int) -> RankSpec:
    return next(
        rank
        for rank in ranks
        if rank.regions[0].first_head
        <= head
        < rank.regions[0].first_head + rank.regions[0].num_heads
    )


def _first_word(rank: int, shape: Shape) -> int:
    return rank * RANK_WORDS if shape.num_kv_heads >= shape.tp_size else 0
