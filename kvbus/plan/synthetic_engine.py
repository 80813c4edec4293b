"""Ranks and block tables as an engine might have them: addresses and ids, no memory.

The same spec gives the same tables, and those of the two sides are unlike.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvbus.errors import ConfigError
from kvbus.geometry import BlockTable, lay_out_rank, num_blocks_for
from kvbus.geometry.blocks import MAX_BLOCKS
from kvbus.plan.spec import PlannedEngine
from kvbus.planning import PlacedRank, Spans

MAX_RANK_BYTES = 1 << 48
RANK_DISTANCE_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class SyntheticEngine:
    """The ranks of an engine, and the block tables of one request by group."""

    ranks: Mapping[int, PlacedRank]
    tables: Mapping[str, BlockTable]


def synthesize(planned: PlannedEngine, spans: Spans, *, step: float | None) -> SyntheticEngine:
    """An engine that holds the positions of ``spans``.

    Its next block is ``step`` of the cache further on, as in a busy cache; without it the next one.
    Raises `ConfigError` when the engine would be too large.
    """
    tables, num_blocks = {}, {}
    for group in planned.engine.groups:
        start, stop = spans[group.name]
        first = start // group.block_size
        needed = num_blocks_for(stop, group.block_size) - first if stop > start else 0
        if needed > MAX_BLOCKS:
            raise ConfigError(
                f"--tokens: {stop} tokens are {needed} blocks of group '{group.name}'"
                f" on side --{planned.engine.engine_id}, at most {MAX_BLOCKS} are allowed"
            )
        # The ids are different, as the cache is a power of 2 and the distance between two is odd.
        cache = num_blocks[group.name] = max(16, 1 << (2 * needed - 1).bit_length())
        distance = 1 if step is None else int(cache * step) | 1
        ids = np.arange(needed, dtype=np.int64) * distance % cache
        tables[group.name] = BlockTable.of(ids, first_block=first)
    ranks = {
        number: _rank(planned, number, num_blocks) for number in range(planned.engine.num_ranks)
    }
    return SyntheticEngine(ranks, tables)


def _rank(planned: PlannedEngine, number: int, num_blocks: Mapping[str, int]) -> PlacedRank:
    rank = lay_out_rank(planned.engine, number, planned.layout, num_blocks=num_blocks)
    segment = rank.segments[0]
    if segment.size_bytes > MAX_RANK_BYTES:
        raise ConfigError(
            f"--{planned.engine.engine_id}: a rank would have {segment.size_bytes} bytes of KV,"
            f" at most {MAX_RANK_BYTES} are allowed"
        )
    addresses = {segment.segment_id: (number + 1) * RANK_DISTANCE_BYTES}
    return PlacedRank(planned.engine, rank, addresses)
