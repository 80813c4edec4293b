"""The blocks of a ring, by group: who gets them, and who waits for them.

Refuses requests that could never have theirs, and more waiting ones than the limit; nobody is
overtaken, so a large request gets its turn.
"""

from collections.abc import Mapping

import anyio

from kvbus.engine.bounce.runs import FreeRuns
from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry.blocks import BlockIds

RingTables = Mapping[str, BlockIds]
"""Blocks of the ring by group, in order of position."""


class HostRing:
    """All blocks of a ring, the same on every rank of the engine.

    A request takes all that it will ever need at once, so that no two wait for each other.
    ``num_blocks`` is by group: see `ring_blocks`.
    """

    def __init__(self, num_blocks: Mapping[str, int], *, max_waiting: int = 256) -> None:
        self.num_blocks = dict(num_blocks)
        self._free = {group: FreeRuns(number) for group, number in num_blocks.items()}
        self._max_waiting, self._num_waiting = max_waiting, 0
        self._turn = anyio.Lock()
        self._given = anyio.Event()

    @property
    def num_held(self) -> int:
        """Blocks that are not free, of all groups."""
        return sum(runs.num_blocks - runs.num_free for runs in self._free.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks."""
        return self._num_waiting

    def check_fits(self, wanted: Mapping[str, int]) -> None:
        """Raise `GeometryError` when the whole ring would not be enough."""
        for group, number in wanted.items():
            if group not in self.num_blocks:
                raise GeometryError(f"the ring has no group '{group}'", field="group")
            if number > self.num_blocks[group]:
                raise GeometryError(
                    f"the request needs {number} blocks of group '{group}', the whole ring has "
                    f"{self.num_blocks[group]}: make the ring larger",
                    needed=number,
                    num_blocks=self.num_blocks[group],
                )

    async def take(self, wanted: Mapping[str, int], *, wait_s: float = 0.0) -> RingTables:
        """Blocks by group; waits for at most ``wait_s`` for other requests to give theirs back.

        Raises `GeometryError` as `check_fits` does, and `LocalError` (``busy``).
        """
        self.check_fits(wanted)
        if not any(wanted.values()) or (not self._num_waiting and self._has(wanted)):
            return self._take(wanted)
        if wait_s <= 0 or self._num_waiting >= self._max_waiting:
            raise self._busy(wanted)
        self._num_waiting += 1
        try:
            with anyio.move_on_after(wait_s):
                async with self._turn:
                    while not self._has(wanted):
                        await self._given.wait()
                    return self._take(wanted)
        finally:
            self._num_waiting -= 1
        raise self._busy(wanted)

    def give(self, tables: RingTables) -> None:
        """These blocks are free again."""
        for group, ids in tables.items():
            self._free[group].give(ids)
        self._given.set()
        self._given = anyio.Event()

    async def all_free(self) -> None:
        """Return when no request holds a block."""
        while self.num_held:
            await self._given.wait()

    def _take(self, wanted: Mapping[str, int]) -> RingTables:
        return {group: self._free[group].take(number) for group, number in wanted.items()}

    def _has(self, wanted: Mapping[str, int]) -> bool:
        return all(self._free[group].num_free >= number for group, number in wanted.items())

    def _busy(self, wanted: Mapping[str, int]) -> LocalError:
        free = ", ".join(f"{self._free[group].num_free} of group '{group}'" for group in wanted)
        return LocalError(
            f"the ring is full: {dict(wanted)} blocks are wanted, free are {free}, and "
            f"{self._num_waiting} requests wait",
            code=ErrorCode.BUSY,
            num_waiting=self._num_waiting,
        )
