"""Tiles: what one unit of a grid looks like on both sides, in the widest words that fit both."""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch

from kvbus.memory.units import Starts

WIDEST_BYTES = 16
WORDS = {
    16: torch.complex128,  # moved as 16 bytes at once, its bits as they are
    8: torch.int64,
    4: torch.int32,
    2: torch.int16,
    1: torch.uint8,
}


GridSteps = tuple[int, ...]


class TileAxis(NamedTuple):
    """One axis of a unit: its size, and the bytes of a step along it on either side."""

    size: int
    rank_bytes: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Tile:
    """One unit: its shape in words, the last axis contiguous on both sides; strides in words."""

    word_bytes: int
    shape: GridSteps
    rank_strides: GridSteps
    slot_strides: GridSteps


def tile_of(itemsize: int, axes: tuple[TileAxis, ...], word_bytes: int) -> Tile:
    """The tile of these axes, in words of at most ``word_bytes``, a power of 2."""
    left = [axis for axis in axes if axis.size > 1]
    run_bytes = itemsize
    while (inner := _next_contiguous(left, run_bytes)) is not None:
        run_bytes *= inner.size
        left.remove(inner)
    word = gcd(word_bytes, run_bytes, *(step for axis in left for step in axis[1:]))
    return Tile(
        word,
        (*(axis.size for axis in left), run_bytes // word),
        (*(axis.rank_bytes // word for axis in left), 1),
        (*(axis.slot_bytes // word for axis in left), 1),
    )


def words_of(buffer: torch.Tensor, word_bytes: int) -> torch.Tensor:
    """All of the buffer's storage as words, what lies before the buffer included."""
    storage = buffer.untyped_storage()
    num_words = storage.nbytes() // word_bytes
    words = torch.empty(0, dtype=WORDS[word_bytes], device=storage.device)
    return words.set_(storage, 0, (num_words,), (1,))


def units_view(
    words: torch.Tensor, origin_bytes: int, starts: Starts, *, shape: GridSteps, strides: GridSteps
) -> torch.Tensor:
    """Axes [unit, *shape] over a storage's words; shape and strides in words."""
    word = words.itemsize
    return words.as_strided(
        (starts.num, *shape),
        (starts.step_bytes // word, *strides),
        (origin_bytes + starts.first_bytes) // word,
    )


def _next_contiguous(axes: list[TileAxis], run_bytes: int) -> TileAxis | None:
    """The axis that continues a run of ``run_bytes`` without a gap on both sides, if any does."""
    return next((axis for axis in axes if axis[1:] == (run_bytes, run_bytes)), None)
