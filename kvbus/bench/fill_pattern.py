"""The pattern that fills every source: each 8-byte word is made from its position."""

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

WORD_BYTES = 8
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_STEP_WORDS = 1 << 20


def words_at(positions: npt.NDArray[Any]) -> Words:
    """The words that belong at these positions, counted in words."""
    return (positions.astype(np.uint64) + np.uint64(1)) * _FACTOR


def fill(words: Words, *, first: int = 0) -> None:
    """Write the pattern to a whole segment, from word ``first`` of it on."""
    for start in range(0, len(words), _STEP_WORDS):
        stop = min(start + _STEP_WORDS, len(words))
        words[start:stop] = words_at(np.arange(first + start, first + stop))
