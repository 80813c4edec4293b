"""Ranks and block tables as an engine might have them: addresses and ids, no memory.

Refuses chance: the same spec gives the same tables, and those of the two sides are unlike.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbus.errors import ConfigError
from kvbus.geometry import BlockTable, EngineSpec, lay_out_rank, num_blocks_for
from kvbus.geometry.blocks import MAX_BLOCKS
from kvbus.plan.spec import Side
from kvbus.planning import PlacedRank, Spans

MAX_RANK_BYTES = 1 << 48
RANK_DISTANCE_BYTES = 1 << 50
PREFILL_STEP, DECODE_STEP = 0.618, 0.414
"""Of the cache: how far from each other the blocks of one request are, in a busy cache."""


@dataclass(frozen=True, slots=True)
class PretendedEngine:
    """The ranks of an engine, and the block tables of one request by group."""

    spec: EngineSpec
    ranks: Mapping[int, PlacedRank]
    tables: Mapping[str, BlockTable]


def pretend(side: Side, spans: Spans, *, step: float | None) -> PretendedEngine:
    """An engine that holds the positions of ``spans``; without ``step`` its blocks are in order.

    Raises `ConfigError` when it would be too large.
    """
    tables, num_blocks = {}, {}
    for group in side.engine.groups:
        start, stop = spans[group.name]
        first = start // group.block_size
        needed = num_blocks_for(stop, group.block_size) - first if stop > start else 0
        if needed > MAX_BLOCKS:
            raise ConfigError(
                f"--tokens: {stop} tokens are {needed} blocks of group '{group.name}'"
                f" on side --{side.engine.engine_id}, at most {MAX_BLOCKS} are allowed"
            )
        num_blocks[group.name] = max(16, 1 << (2 * needed - 1).bit_length())
        ids = _ids(needed, num_blocks[group.name], step)
        tables[group.name] = BlockTable.of(ids, first_block=first)
    return PretendedEngine(side.engine, _ranks(side, num_blocks), tables)


def _ids(needed: int, num_blocks: int, step: float | None) -> npt.NDArray[np.int64]:
    """Different ids, as ``num_blocks`` is a power of 2 and the distance between them is odd."""
    distance = 1 if step is None else int(num_blocks * step) | 1
    return np.arange(needed, dtype=np.int64) * distance % num_blocks


def _ranks(side: Side, num_blocks: Mapping[str, int]) -> dict[int, PlacedRank]:
    ranks = {}
    for number in range(side.engine.num_ranks):
        rank = lay_out_rank(side.engine, number, side.layout, num_blocks=num_blocks)
        segment = rank.segments[0]
        if segment.size_bytes > MAX_RANK_BYTES:
            raise ConfigError(
                f"--{side.engine.engine_id}: a rank would have {segment.size_bytes} bytes of KV,"
                f" at most {MAX_RANK_BYTES} are allowed"
            )
        addresses = {segment.segment_id: (number + 1) * RANK_DISTANCE_BYTES}
        ranks[number] = PlacedRank(side.engine, rank, addresses)
    return ranks
