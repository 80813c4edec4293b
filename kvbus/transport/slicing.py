"""How a read is cut into slices, the largest things that are ever posted at once.

Axes: R rows (descriptors), 3 columns (address, length in bytes, device).
"""

import numpy as np
import numpy.typing as npt

from kvbus.errors import LocalError

Rows = npt.NDArray[np.uint64]


def check_rows(local: Rows, remote: Rows) -> None:
    """Raise `LocalError` unless both are uint64 [R, 3], with equal lengths above 0 row by row."""
    for side, rows in (("local", local), ("remote", remote)):
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint64:
            raise LocalError("descriptors must be a numpy array of uint64", side=side)
        if rows.ndim != 2 or rows.shape[1] != 3:
            raise LocalError("descriptors must have the shape (n, 3)", side=side)
    if len(local) != len(remote):
        raise LocalError(
            "both sides need as many descriptors", local=len(local), remote=len(remote)
        )
    unequal = local[:, 1] != remote[:, 1]
    if unequal.any():
        raise LocalError("descriptor lengths differ", row=int(unequal.argmax()))
    if not local[:, 1].all():
        raise LocalError("a descriptor is empty", row=int((local[:, 1] == 0).argmax()))


class Slices:
    """The slices of one read, cut as they are taken.

    The arrays are kept, not copied, until `clear`: the caller does not change them before.
    """

    __slots__ = ("_ends", "_local", "_next_row", "_remote", "_slice_bytes", "_slice_rows")

    def __init__(self, local: Rows, remote: Rows, *, slice_bytes: int, slice_rows: int) -> None:
        self._local, self._remote = (_without_long(rows, slice_bytes) for rows in (local, remote))
        self._ends = np.cumsum(self._local[:, 1])
        self._slice_bytes = slice_bytes
        self._slice_rows = slice_rows
        self._next_row = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole read."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def num_rows(self) -> int:
        """Rows of the whole read, long ones cut."""
        return len(self._local)

    @property
    def exhausted(self) -> bool:
        """Whether every row was taken."""
        return self._next_row >= len(self._local)

    def clear(self) -> None:
        """Let go of the arrays; nothing is left to take."""
        self._local = self._remote = np.empty((0, 3), np.uint64)
        self._ends = np.empty(0, np.uint64)

    def take(self) -> tuple[Rows, Rows, int]:
        """The next slice: local rows, remote rows, bytes."""
        start = self._next_row
        before = int(self._ends[start - 1]) if start else 0
        most = np.uint64(before + self._slice_bytes)  # an int would convert the whole array
        stop = int(np.searchsorted(self._ends, most, side="right"))
        stop = min(stop, start + self._slice_rows)
        self._next_row = stop
        num_bytes = int(self._ends[stop - 1]) - before
        return self._local[start:stop], self._remote[start:stop], num_bytes


def _without_long(rows: Rows, max_bytes: int) -> Rows:
    """Every descriptor longer than that cut into pieces of at most that, in order."""
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
