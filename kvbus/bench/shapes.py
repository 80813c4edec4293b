"""The caches that are measured, and block tables that make runs of a wanted length."""

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvbus.geometry import BlockTable, lay_out_rank, num_blocks_for
from kvbus.planning import PlacedRank, ReadMap, Reads, RunPlan
from kvbus.spec_text import ModelWords, read_words

Blocks = npt.NDArray[np.int64]

GROUP = "attention"
NUM_PARTS, DTYPE_BYTES = 2, 2


class Shape(ModelWords, kw_only=True):
    """An engine; with ``host`` its cache is memory of its own, behind a ring of host blocks."""

    host: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, over all layers and heads."""
        return self.layers * NUM_PARTS * self.kv_heads * self.head * DTYPE_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers and heads."""
        return self.block * self.token_bytes


def _shape(text: str) -> Shape:
    return read_words("shape", f"{text} head=128", Shape)


BIG = _shape("layers=4 kv_heads=8 cross_layer=true")
"""One run of 256 KiB a block."""

BIG_HOST = msgspec.structs.replace(BIG, host=True)
"""The same, on a device that no agent maps."""

LAYERED = _shape("layers=16 kv_heads=2")
"""16 runs of 16 KiB a block."""

SMALL = _shape("layers=4 kv_heads=2 cross_layer=true")
"""One run of 64 KiB a block."""

NHD_1 = _shape("layers=16 kv_heads=8")
NHD_2 = _shape("layers=16 kv_heads=8 tp=2")
HND_1 = _shape("layers=16 kv_heads=8 layout=HND")


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
    return PairedBlocks(blocks, blocks, num_blocks * shape.block)


def scattered(
    num_blocks: int, shape: Shape = BIG, *, first_block: int = 0, seed: int = 0
) -> PairedBlocks:
    """Every other block of a stretch of twice as many, shuffled on both sides: no runs merge."""
    num_tokens = num_blocks * shape.block
    return scattered_tokens(shape, shape, num_tokens, first_block=first_block, seed=seed)


def scattered_tokens(
    source: Shape, target: Shape, num_tokens: int, *, first_block: int = 0, seed: int = 0
) -> PairedBlocks:
    """As `scattered`, for shapes whose blocks differ in size."""
    rng = np.random.default_rng(seed)
    prefill, decode = (
        rng.permutation(first_block + 2 * np.arange(num_blocks_for(num_tokens, shape.block)))
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
    spec, placed, end = shape.engine("any"), {}, 0
    for number in range(shape.tp):
        rank = lay_out_rank(spec, number, shape.parse(), num_blocks=num_blocks)
        placed[number] = PlacedRank(spec, rank, {rank.segments[0].segment_id: end})
        end += rank.segments[0].size_bytes
    return placed, end
