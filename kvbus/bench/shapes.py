"""The caches that are measured, and block tables that make runs of a wanted length.

Refuses memory: both sides derive the same shape from its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbus.geometry import BlockTable, EngineSpec, GroupSpec, KvLayout, RankSpec, lay_out_rank
from kvbus.planning import Descriptors, DirectPlan, PlacedRank

Blocks = npt.NDArray[np.int64]

GROUP = "full"
BLOCK_SIZE = 16
HEAD_DIM = 128
DTYPE, DTYPE_BYTES = "bfloat16", 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A cache of one rank, the same on both sides; ``block_bytes`` are of all layers."""

    name: str
    num_layers: int
    num_kv_heads: int
    layout: KvLayout

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers."""
        return self.num_layers * 2 * BLOCK_SIZE * self.num_kv_heads * HEAD_DIM * DTYPE_BYTES

    def spec(self, engine_id: str) -> EngineSpec:
        """The engine that has this cache."""
        layers = tuple(range(self.num_layers))
        group = GroupSpec(GROUP, layers, BLOCK_SIZE, self.num_kv_heads, HEAD_DIM, DTYPE)
        return EngineSpec(engine_id, f"bench-{self.name}", 1, (group,))

    def rank(self, num_blocks: int) -> RankSpec:
        """The memory of a cache of so many blocks."""
        return lay_out_rank(self.spec("any"), 0, self.layout, num_blocks=num_blocks)


BIG = Shape("big", 4, 8, KvLayout.parse("NHD", cross_layer=True))
"""One run of 256 KiB a block."""

LAYERED = Shape("layered", 16, 2, KvLayout.parse("NHD"))
"""16 runs of 16 KiB a block."""

SMALL = Shape("small", 4, 2, KvLayout.parse("NHD", cross_layer=True))
"""One run of 64 KiB a block."""

SHAPES: Mapping[str, Shape] = {shape.name: shape for shape in (BIG, LAYERED, SMALL)}


@dataclass(frozen=True, slots=True)
class Tables:
    """The blocks of one request on both sides, in order of position."""

    prefill: Blocks
    decode: Blocks

    @property
    def num_tokens(self) -> int:
        """Tokens in these blocks, all of them full."""
        return len(self.prefill) * BLOCK_SIZE


def contiguous(num_blocks: int) -> Tables:
    """Blocks in order on both sides: all runs merge."""
    return Tables(np.arange(num_blocks), np.arange(num_blocks))


def scattered(num_blocks: int, *, first_block: int = 0, seed: int = 0) -> Tables:
    """Every other block of a stretch of twice as many, shuffled on both sides: no runs merge."""
    rng = np.random.default_rng(seed)
    even = first_block + 2 * np.arange(num_blocks)
    return Tables(rng.permutation(even), rng.permutation(even))


def descriptors(shape: Shape, num_blocks: int, tables: Tables) -> Descriptors:
    """What kvbus reads for ``tables``, as offsets into the two segments."""
    rank = shape.rank(num_blocks)
    placed = PlacedRank(shape.spec("any"), rank, {s.segment_id: 0 for s in rank.segments})
    return DirectPlan([placed], [placed]).descriptors(
        {GROUP: BlockTable.of(tables.prefill)},
        {GROUP: BlockTable.of(tables.decode)},
        start=0,
        stop=tables.num_tokens,
    )
