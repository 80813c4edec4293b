"""Free block ids, handed out in runs as long as there are (pure)."""

from collections.abc import Iterable

import numpy as np

from kvbus.errors import LocalError
from kvbus.geometry.blocks import BlockIds


class BlockPool:
    """Ids 0 to ``num_blocks`` - 1, all free at first.

    `acquire` takes the shortest run of free ids that is long enough, else the longest ones: what is
    copied together lies together, as far as that goes.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._is_free = np.ones(num_blocks, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        """How many ids could be acquired."""
        return int(np.count_nonzero(self._is_free))

    def acquire(self, num_blocks: int) -> BlockIds:
        """So many ids; raises `LocalError` when there are not so many."""
        if not 0 <= num_blocks <= self.num_free:
            raise LocalError(f"{num_blocks} blocks of {self.num_free} free ones")
        runs = [np.empty(0, dtype=np.uint32)]
        while (left := num_blocks - sum(map(len, runs))) > 0:
            runs.append(self._acquire_run(left))
        return np.concatenate(runs)

    def release(self, ids: Iterable[int]) -> None:
        """These are free again; raises `LocalError`, and frees none, if one of them was."""
        given = np.fromiter(ids, dtype=np.int64)
        if (
            np.any((given < 0) | (given >= self.num_blocks))
            or len(np.unique(given)) < len(given)
            or np.any(self._is_free[given])
        ):
            raise LocalError(f"of blocks {given.tolist()} some are free, or none of this pool")
        self._is_free[given] = True

    def _acquire_run(self, at_most: int) -> BlockIds:
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        enough = np.flatnonzero(lengths >= at_most)
        best = enough[lengths[enough].argmin()] if enough.size else lengths.argmax()
        start, stop = starts[best], starts[best] + min(lengths[best], at_most)
        self._is_free[start:stop] = False
        return np.arange(start, stop, dtype=np.uint32)
