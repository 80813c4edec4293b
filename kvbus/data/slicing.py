"""Slices of a READ: the largest parts that are posted together.

Rows are descriptors: address, length in bytes, device.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint64]


class Slices:
    def __init__(self, *, slice_bytes: int, slice_rows: int, num_parts: int = 1) -> None:
        self._slice_bytes, self._slice_rows = slice_bytes, slice_rows
        self._num_missing = num_parts
        self._parts: deque[_Part] = deque()

    @property
    def is_ready(self) -> bool:
        return bool(self._parts)

    @property
    def exhausted(self) -> bool:
        return not (self._parts or self._num_missing)

    def add(self, local: Rows, remote: Rows) -> None:
        self._num_missing -= 1
        if len(local):
            self._parts.append(_Part(local, remote, self._slice_bytes))

    def clear(self) -> None:
        self._parts.clear()
        self._num_missing = 0

    def take(self) -> tuple[Rows, Rows, int]:
        part = self._parts[0]
        taken = part.take(self._slice_bytes, self._slice_rows)
        if part.next_row >= len(part.local):
            self._parts.popleft()
        return taken


class _Part:
    def __init__(self, local: Rows, remote: Rows, max_bytes: int) -> None:
        self.local, self._remote = (_without_long(rows, max_bytes) for rows in (local, remote))
        self._ends = np.cumsum(self.local[:, 1])
        self.next_row = 0

    def take(self, slice_bytes: int, slice_rows: int) -> tuple[Rows, Rows, int]:
        start = self.next_row
        before = int(self._ends[start - 1]) if start else 0
        most = np.uint64(before + slice_bytes)  # an int would convert the whole array
        stop = int(np.searchsorted(self._ends, most, side="right"))
        self.next_row = stop = min(stop, start + slice_rows)
        num_bytes = int(self._ends[stop - 1]) - before
        return self.local[start:stop], self._remote[start:stop], num_bytes


def _without_long(rows: Rows, max_bytes: int) -> Rows:
    lengths = rows[:, 1]
    if not len(rows) or int(lengths.max()) <= max_bytes:
        return rows
    limit = np.uint64(max_bytes)
    num_pieces = ((lengths - np.uint64(1)) // limit).astype(np.int64) + 1
    pieces = np.repeat(rows, num_pieces, axis=0)
    first_piece = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    index = (np.arange(len(pieces)) - first_piece).astype(np.uint64)
    pieces[:, 0] += index * limit
    pieces[:, 1] = np.minimum(pieces[:, 1] - index * limit, limit)
    return pieces
