"""The caches that are measured, and block tables that make runs of a wanted length."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvbus.geometry import (
    BlockTable,
    EngineSpec,
    GroupSpec,
    KvLayout,
    KvPart,
    lay_out_rank,
    num_blocks_for,
)
from kvbus.planning import PlacedRank, ReadMap, Reads, RunPlan

Blocks = npt.NDArray[np.int64]

GROUP = "full"
DTYPE, DTYPE_BYTES = "bfloat16", 2
KV = (KvPart.KEY, KvPart.VALUE)


@dataclass(frozen=True, slots=True)
class Shape:
    """The cache of an engine; two of equal layers, heads and head size can exchange KV.

    With ``host`` it is memory of the engine's own, which goes through a ring of host blocks.
    """

    num_layers: int
    num_kv_heads: int
    layout: str = "NHD"
    cross_layer: bool = False
    tp_size: int = 1
    block_size: int = 16
    head_dim: int = 128
    host: bool = False

    @property
    def kv_layout(self) -> KvLayout:
        """As the geometry has it."""
        return KvLayout.parse(self.layout, cross_layer=self.cross_layer)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, over all layers and heads."""
        return self.num_layers * len(KV) * self.num_kv_heads * self.head_dim * DTYPE_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers and heads."""
        return self.block_size * self.token_bytes

    def spec(self, engine_id: str) -> EngineSpec:
        """The engine that has this cache."""
        layers = tuple(range(self.num_layers))
        group = GroupSpec(
            GROUP, layers, self.block_size, self.num_kv_heads, self.head_dim, DTYPE, KV
        )
        model = f"bench-{self.num_layers}x{self.num_kv_heads}x{self.head_dim}"
        return EngineSpec(engine_id, model, self.tp_size, (group,))


BIG = Shape(4, 8, cross_layer=True)
"""One run of 256 KiB a block."""

BIG_HOST = replace(BIG, host=True)
"""The same, on a device that no agent maps."""

LAYERED = Shape(16, 2)
"""16 runs of 16 KiB a block."""

SMALL = Shape(4, 2, cross_layer=True)
"""One run of 64 KiB a block."""

NHD_1 = Shape(16, 8)
NHD_2 = replace(NHD_1, tp_size=2)
HND_1 = replace(NHD_1, layout="HND")


@dataclass(frozen=True, slots=True)
class PairedBlocks:
    """The blocks of one request on both sides, in order of position."""

    prefill: Blocks
    decode: Blocks
    num_tokens: int

    @property
    def capacities(self) -> tuple[int, int]:
        """Blocks of the two caches: twice those of the request, so that none need be neighbours."""
        return 2 * len(self.prefill), 2 * len(self.decode)


def contiguous(num_blocks: int, shape: Shape = BIG, *, first_block: int = 0) -> PairedBlocks:
    """Blocks in order on both sides: all runs merge."""
    blocks = first_block + np.arange(num_blocks)
    return PairedBlocks(blocks, blocks, num_blocks * shape.block_size)


def scattered(
    num_blocks: int, shape: Shape = BIG, *, first_block: int = 0, seed: int = 0
) -> PairedBlocks:
    """Every other block of a stretch of twice as many, shuffled on both sides: no runs merge."""
    num_tokens = num_blocks * shape.block_size
    return scattered_tokens(shape, shape, num_tokens, first_block=first_block, seed=seed)


def scattered_tokens(
    source: Shape, target: Shape, num_tokens: int, *, first_block: int = 0, seed: int = 0
) -> PairedBlocks:
    """As `scattered`, for shapes whose blocks differ in size."""
    rng = np.random.default_rng(seed)
    prefill, decode = (
        rng.permutation(first_block + 2 * np.arange(num_blocks_for(num_tokens, shape.block_size)))
        for shape in (source, target)
    )
    return PairedBlocks(prefill, decode, num_tokens)


def direct_descriptors(source: Shape, target: Shape, tables: PairedBlocks) -> tuple[Reads, int]:
    """What the direct path reads between two memories, by offsets, and the larger one's bytes."""
    num_source, num_target = tables.capacities
    prefill, prefill_bytes = _placed_ranks(source, num_source)
    decode, decode_bytes = _placed_ranks(target, num_target)
    ranks = [[placed.rank for placed in side.values()] for side in (prefill, decode)]
    runs = RunPlan(prefill, decode, ReadMap(*ranks).shares()).runs(
        {GROUP: BlockTable.of(tables.prefill)},
        {GROUP: BlockTable.of(tables.decode)},
        {GROUP: (0, tables.num_tokens)},
    )
    return runs.reads(), max(prefill_bytes, decode_bytes)


def _placed_ranks(shape: Shape, num_blocks: int) -> tuple[dict[int, PlacedRank], int]:
    """All ranks one behind the other in a single memory, and its size in bytes."""
    spec, placed, end = shape.spec("any"), {}, 0
    for number in range(shape.tp_size):
        rank = lay_out_rank(spec, number, shape.kv_layout, num_blocks=num_blocks)
        placed[number] = PlacedRank(spec, rank, {rank.segments[0].segment_id: end})
        end += rank.segments[0].size_bytes
    return placed, end
