"""Free block ids of a ring, handed out in runs as long as there are.

Refuses to hand a block out twice, and to take one back that is free.
"""

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from kvbus.errors import LocalError
from kvbus.geometry.blocks import BlockIds


class FreeRuns:
    """Ids 0 to ``num_blocks`` - 1, all free at first.

    Free neighbours are one run. `take` takes the shortest run that is long enough, else the longest
    ones: what is copied together lies together, as far as that goes.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self.num_free = num_blocks
        self._starts = [0] if num_blocks else []
        self._stops = [num_blocks] if num_blocks else []

    def take(self, num_blocks: int) -> BlockIds:
        """So many ids; raises `LocalError` when there are not so many."""
        if not 0 <= num_blocks <= self.num_free:
            raise LocalError(f"{num_blocks} blocks of {self.num_free} free ones")
        runs: list[range] = []
        while (left := num_blocks - sum(map(len, runs))) > 0:
            runs.append(self._take_run(left))
        return np.concatenate([np.arange(0), *map(np.asarray, runs)]).astype(np.uint32)

    def give(self, ids: Iterable[int]) -> None:
        """These are free again; raises `LocalError`, and takes none back, if one of them was."""
        runs = list(_runs(sorted(int(one) for one in ids)))
        stops = [run.stop for run in runs]
        again = any(run.start < stop for run, stop in zip(runs[1:], stops[:-1], strict=True))
        if again or any(self._touches_free(run) for run in runs):
            raise LocalError(f"of blocks {runs} some are free, or none of this ring")
        for run in runs:
            self._add(run)

    def _take_run(self, at_most: int) -> range:
        lengths = [stop - start for start, stop in zip(self._starts, self._stops, strict=True)]
        enough = [length for length in lengths if length >= at_most]
        index = lengths.index(min(enough) if enough else max(lengths))
        start = self._starts[index]
        stop = min(self._stops[index], start + at_most)
        if stop == self._stops[index]:
            del self._starts[index], self._stops[index]
        else:
            self._starts[index] = stop
        self.num_free -= stop - start
        return range(start, stop)

    def _touches_free(self, run: range) -> bool:
        if run.start < 0 or run.stop > self.num_blocks:
            return True
        index = bisect_right(self._starts, run.stop - 1) - 1
        return index >= 0 and self._stops[index] > run.start

    def _add(self, run: range) -> None:
        index = bisect_right(self._starts, run.start)
        start, stop = run.start, run.stop
        first = last = index
        if index and self._stops[index - 1] == start:
            first, start = index - 1, self._starts[index - 1]
        if index < len(self._starts) and self._starts[index] == stop:
            last, stop = index + 1, self._stops[index]
        self._starts[first:last], self._stops[first:last] = [start], [stop]
        self.num_free += len(run)


def _runs(ids: list[int]) -> Iterable[range]:
    """Sorted ids as runs of neighbours; one that is there twice starts a run of its own."""
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            yield range(ids[start], ids[end - 1] + 1)
            start = end
