"""The caches that are measured, and block tables that make runs of a wanted length."""

from collections.abc import Mapping
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
    """The cache of an engine; two of equal layers, heads and parts can exchange KV.

    With ``host`` it is memory of the engine's own, which goes through a ring of host blocks.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    layout: KvLayout
    tp_size: int = 1
    block_size: int = 16
    head_dim: int = 128
    parts: tuple[KvPart, ...] = KV
    host: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, over all layers and heads."""
        return self.num_layers * len(self.parts) * self.num_kv_heads * self.head_dim * DTYPE_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers and heads."""
        return self.block_size * self.token_bytes

    def spec(self, engine_id: str) -> EngineSpec:
        """The engine that has this cache."""
        layers = tuple(range(self.num_layers))
        group = GroupSpec(
            GROUP, layers, self.block_size, self.num_kv_heads, self.head_dim, DTYPE, self.parts
        )
        model = f"bench-{self.num_layers}x{self.num_kv_heads}x{self.head_dim}"
        return EngineSpec(engine_id, model, self.tp_size, (group,))


BIG = Shape("big", 4, 8, KvLayout.parse("NHD", cross_layer=True))
"""One run of 256 KiB a block."""

BIG_HOST = replace(BIG, name="big-host", host=True)
"""The same, on a device that no agent maps."""

LAYERED = Shape("layered", 16, 2, KvLayout.parse("NHD"))
"""16 runs of 16 KiB a block."""

SMALL = Shape("small", 4, 2, KvLayout.parse("NHD", cross_layer=True))
"""One run of 64 KiB a block."""

TINY_RUNS = Shape("tiny-runs", 128, 1, KvLayout.parse("NHD"), block_size=4, head_dim=32)
"""128 runs of 512 bytes a block, one a layer."""

NHD, HND = KvLayout.parse("NHD"), KvLayout.parse("HND")
NHD_1 = Shape("nhd-1", 16, 8, NHD)
NHD_2 = Shape("nhd-2", 16, 8, NHD, tp_size=2)
HND_1 = Shape("hnd-1", 16, 8, HND)
NHD_64 = Shape("nhd-64", 16, 8, NHD, block_size=64)
MLA_1 = Shape("mla-1", 32, 1, NHD, head_dim=512, parts=(KvPart.LATENT,))
MLA_2 = Shape("mla-2", 32, 1, NHD, head_dim=512, parts=(KvPart.LATENT,), tp_size=2)

EQUAL = BIG, BIG_HOST, LAYERED, SMALL, TINY_RUNS
OTHER = NHD_1, NHD_2, HND_1, NHD_64, MLA_1, MLA_2
SHAPES: Mapping[str, Shape] = {shape.name: shape for shape in (*EQUAL, *OTHER)}


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


def contiguous(num_blocks: int, shape: Shape = BIG) -> PairedBlocks:
    """Blocks in order on both sides: all runs merge."""
    blocks = np.arange(num_blocks)
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
        rank = lay_out_rank(spec, number, shape.layout, num_blocks=num_blocks)
        placed[number] = PlacedRank(spec, rank, {rank.segments[0].segment_id: end})
        end += rank.segments[0].size_bytes
    return placed, end
