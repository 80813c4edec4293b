"""Units: the positions of a box in parts of equal length that lie in one block on either side."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbus.geometry import BlockTable, num_blocks_for

Numbers = npt.NDArray[np.int64]


class SlotSteps(NamedTuple):
    """How the positions of a slot follow each other; ``first_block`` is the first that it has."""

    block_bytes: int
    token_bytes: int
    block_size: int
    first_block: int

    @property
    def even(self) -> bool:
        """Whether any two positions next to each other are as far apart as any other two."""
        return self.block_size == 1 or self.block_bytes == self.block_size * self.token_bytes

    def offset_bytes(self, position: int) -> int:
        """Of a position, from the slot's first block."""
        block, token = divmod(position, self.block_size)
        return (block - self.first_block) * self.block_bytes + token * self.token_bytes

    @property
    def step_bytes(self) -> int:
        """From one position to the next within a unit."""
        return self.block_bytes if self.block_size == 1 else self.token_bytes


class Starts(NamedTuple):
    """Where units start: at ``first_bytes`` + i * ``step_bytes``, for each of ``num`` units i.

    With ``chosen``, i is one of its numbers, all below ``num``.
    """

    num: int
    first_bytes: int
    step_bytes: int
    chosen: Numbers | None = None


@dataclass(frozen=True, slots=True)
class Units:
    """Units of ``num_tokens`` each: scattered over the rank's blocks, at equal steps in the slot.

    Unit i starts at token ``tokens[i]`` of block ``blocks[i]``; ``in_slot`` counts from the
    slot's first block.
    """

    num_tokens: int
    blocks: Numbers
    tokens: Numbers
    in_slot: Starts

    def in_rank(self, block_bytes: int, token_bytes: int) -> Starts:
        """Where the units start, counted from token 0 of block 0."""
        offsets = self.blocks * block_bytes + self.tokens * token_bytes
        first, num = int(offsets[0]), offsets.size
        if num == 1:
            return Starts(1, first, 0)
        step = int(offsets[1]) - first
        if step > 0 and bool((np.diff(offsets) == step).all()):
            return Starts(num, first, step)
        step = int(np.gcd.reduce(offsets)) or 1
        chosen = offsets // step
        return Starts(int(chosen.max()) + 1, 0, step, chosen)


def cut_into_units(
    table: BlockTable, slot: SlotSteps, start: int, stop: int, *, block_size: int
) -> Iterator[Units]:
    """[start, stop) once: whole units together, and what is left before and after them apart.

    ``table`` has the rank's blocks of these positions, each of ``block_size``.
    """
    ids = table.array()

    def units(positions: Numbers, num_tokens: int) -> Units:
        first = slot.offset_bytes(int(positions[0]))
        step = slot.offset_bytes(int(positions[1])) - first if positions.size > 1 else 0
        rows, tokens = np.divmod(positions, block_size)
        blocks = ids[rows - table.first_block].astype(np.int64)
        return Units(num_tokens, blocks, tokens, Starts(positions.size, first, step))

    size = block_size if slot.even else gcd(block_size, slot.block_size)
    first = min(num_blocks_for(start, size) * size, stop)
    last = max(stop // size * size, first)
    if start < first:
        yield units(np.array([start]), first - start)
    for positions in _even_rows(np.arange(first, last, size), slot, size):
        yield units(positions, size)
    if last < stop:
        yield units(np.array([last]), stop - last)


def _even_rows(positions: Numbers, slot: SlotSteps, size: int) -> list[Numbers]:
    """Splits the positions of units into few rows with equal steps in the slot.

    Units that start at the same token of the slot's blocks lie so, and those of one block.
    """
    if slot.even or positions.size < 2:
        return [positions] if positions.size else []
    num_residues = slot.block_size // size
    rows = positions // slot.block_size
    if num_residues <= rows[-1] - rows[0] + 1:
        return [positions[start::num_residues] for start in range(min(num_residues, rows.size))]
    return np.split(positions, np.flatnonzero(np.diff(rows)) + 1)
