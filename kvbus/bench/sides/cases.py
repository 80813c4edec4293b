"""What is handed over: caches of both sides, and block tables that make runs of a wanted length.

The names go from side to side, so a name never changes its meaning.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbus.bench.shapes import (
    BIG,
    HND_1,
    NHD_1,
    SMALL,
    TINY_RUNS,
    PairedBlocks,
    Shape,
    contiguous,
    scattered_tokens,
)
from kvbus.geometry import KvLayout

KIB, MIB = 1 << 10, 1 << 20
FEW, MANY = 1, 10

CROSS_LAYER = KvLayout.parse("NHD", cross_layer=True)
RUNS_16K = Shape("runs-16k", 2, 1, CROSS_LAYER)
RUNS_1M = Shape("runs-1m", 16, 8, CROSS_LAYER)


def in_order(source: Shape, _: Shape, num_tokens: int) -> PairedBlocks:
    """Of equal shapes: all runs merge."""
    return contiguous(num_tokens // source.block_size, source)


@dataclass(frozen=True, slots=True)
class PairCase:
    """Handoffs of one kind: so many of them in each round.

    ``run_bytes`` are what is contiguous on both sides, 0 where that is everything. With ``is_one``
    a block is handed over, which shows what a handoff costs beside its bytes.
    """

    name: str
    source: Shape
    target: Shape
    run_bytes: int
    place: Callable[[Shape, Shape, int], PairedBlocks] = scattered_tokens
    times: int = FEW
    is_one: bool = False

    def tables(self, num_mib: int) -> PairedBlocks:
        """The blocks of both sides, the same wherever and whenever they are asked for."""
        most_bytes = 1 if self.is_one else num_mib * MIB
        num_blocks = max(1, most_bytes // self.source.block_bytes)
        return self.place(self.source, self.target, num_blocks * self.source.block_size)

    def num_handoffs(self, rounds: int) -> int:
        """The first compares every byte, and is not counted."""
        return 1 + rounds * self.times


CASES: Mapping[str, PairCase] = {
    case.name: case
    for case in (
        PairCase("one-block", SMALL, SMALL, 0, in_order, times=MANY, is_one=True),
        PairCase("hnd-to-nhd", HND_1, NHD_1, 256),
        PairCase("runs-512b", TINY_RUNS, TINY_RUNS, 512),
        PairCase("runs-16k", RUNS_16K, RUNS_16K, 16 * KIB),
        PairCase("runs-64k", SMALL, SMALL, 64 * KIB),
        PairCase("runs-256k", BIG, BIG, 256 * KIB),
        PairCase("runs-1m", RUNS_1M, RUNS_1M, MIB),
        PairCase("in-order", RUNS_1M, RUNS_1M, 0, in_order),
    )
}
