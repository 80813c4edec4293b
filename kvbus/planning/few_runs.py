"""A few runs by integers: one call of numpy costs as much as a run does here, and there are many.

Refuses more than `MAX_RUNS`: from there on arrays are faster.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from kvbus.geometry import BlockTable
from kvbus.planning.pairs import Form, Pattern, Strides

MAX_RUNS = 32

Rows = npt.NDArray[np.uint64]
Run = tuple[int, int, int]
"""Local address, remote address, bytes."""


class FewRuns:
    """The runs of the pairs of one form; ``pattern`` is that of all pairs, for a unit's length."""

    def __init__(self, form: Form, pattern: Callable[[int], Pattern]) -> None:
        self._remote, self._local, self._pattern = form.remote, form.local, pattern
        self._offsets: dict[int, tuple[list[tuple[int, int]], int]] = {}

    def count(self, start: int, stop: int) -> int:
        """How many runs positions [start, stop) have, before neighbours are merged."""
        return sum(self._pattern(end - at).num_runs for at, end in self._units(start, stop))

    def runs(self, remote: BlockTable, local: BlockTable, start: int, stop: int) -> Iterator[Run]:
        """The runs of positions [start, stop); raises `IndexError` when a table lacks one."""
        for at, end in self._units(start, stop):
            remote_at = _address(self._remote, remote, at)
            local_at = _address(self._local, local, at)
            offsets, run_bytes = self._of_unit(end - at)
            for from_remote, from_local in offsets:
                yield local_at + from_local, remote_at + from_remote, run_bytes

    def _units(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Each lies in one block on either side."""
        sizes = self._remote.block_size, self._local.block_size
        while start < stop:
            end = min(stop, *(start - start % size + size for size in sizes))
            yield start, end
            start = end

    def _of_unit(self, num_tokens: int) -> tuple[list[tuple[int, int]], int]:
        """Offsets of its runs from the unit's corner, remote and local; and their bytes."""
        known = self._offsets.get(num_tokens)
        if known is None:
            pattern = self._pattern(num_tokens)
            sums = (pattern.outer[:, :, None] + pattern.inner[:, None, :]).reshape(2, -1)
            offsets = [(remote, local) for remote, local in sums.T.tolist()]
            known = self._offsets[num_tokens] = offsets, pattern.run_bytes
        return known


def merged_rows(runs: Iterable[Run]) -> tuple[Rows, Rows]:
    """Rows of address, bytes, device, local and remote: ascending, neighbours merged."""
    merged: list[Run] = []
    for local, remote, num_bytes in sorted(runs):
        if merged:
            before_local, before_remote, before_bytes = merged[-1]
            if before_local + before_bytes == local and before_remote + before_bytes == remote:
                merged[-1] = before_local, before_remote, before_bytes + num_bytes
                continue
        merged.append((local, remote, num_bytes))
    local_rows = [(local, num_bytes, 0) for local, _, num_bytes in merged]
    remote_rows = [(remote, num_bytes, 0) for _, remote, num_bytes in merged]
    return _rows(local_rows), _rows(remote_rows)


def _rows(rows: list[Run]) -> Rows:
    return np.array(rows, dtype=np.uint64).reshape(-1, 3)


def _address(strides: Strides, table: BlockTable, position: int) -> int:
    """Of a position, from block 0 on."""
    block, within = divmod(position, strides.block_size)
    return table.block(block) * strides.block_bytes + within * strides.token_bytes
