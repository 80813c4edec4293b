"""The host blocks of an engine, by group: who gets them, and who waits for them.

Refuses requests that could never have theirs, and more waiting ones than the limit; nobody is
overtaken, so a large request gets its turn.
"""

from collections.abc import Mapping

import anyio

from kvbus.engine.bounce.block_pool import BlockPool
from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry.blocks import BlockIds

HostTables = Mapping[str, BlockIds]
"""Host blocks by group, in order of position."""


class HostPool:
    """All host blocks, the same on every rank of the engine; ``num_blocks`` is by group.

    A request acquires all that it will ever need at once, so that no two wait for each other.
    """

    def __init__(self, num_blocks: Mapping[str, int], *, max_waiting: int = 256) -> None:
        self.num_blocks = dict(num_blocks)
        self.num_waiting = 0
        """Requests that wait for blocks."""
        self._max_waiting = max_waiting
        self._pools = {group: BlockPool(number) for group, number in num_blocks.items()}
        self._turn = anyio.Lock()
        self._released = anyio.Event()

    @property
    def num_held(self) -> int:
        """Blocks that are not free, of all groups."""
        return sum(pool.num_blocks - pool.num_free for pool in self._pools.values())

    def check_fits(self, wanted: Mapping[str, int]) -> None:
        """Raise `GeometryError` when all blocks together would not be enough."""
        for group, number in wanted.items():
            if group not in self.num_blocks:
                raise GeometryError(f"there are no host blocks of group '{group}'", field="group")
            if number > self.num_blocks[group]:
                raise GeometryError(
                    f"the request needs {number} host blocks of group '{group}', there are only "
                    f"{self.num_blocks[group]}: make the host buffer larger",
                    needed=number,
                    num_blocks=self.num_blocks[group],
                )

    async def acquire(self, wanted: Mapping[str, int], *, wait_s: float = 0.0) -> HostTables:
        """Blocks by group; waits for at most ``wait_s`` for other requests to release theirs.

        Raises `GeometryError` as `check_fits` does, and `LocalError` (``busy``).
        """
        self.check_fits(wanted)
        if not any(wanted.values()) or (not self.num_waiting and self._has(wanted)):
            return self._acquire(wanted)
        if wait_s <= 0 or self.num_waiting >= self._max_waiting:
            raise self._busy(wanted)
        self.num_waiting += 1
        try:
            with anyio.move_on_after(wait_s):
                async with self._turn:
                    while not self._has(wanted):
                        await self._released.wait()
                    return self._acquire(wanted)
        finally:
            self.num_waiting -= 1
        raise self._busy(wanted)

    def release(self, tables: HostTables) -> None:
        """These blocks are free again."""
        for group, ids in tables.items():
            self._pools[group].release(ids)
        self._released.set()
        self._released = anyio.Event()

    async def all_free(self) -> None:
        """Return when no request holds a block."""
        while self.num_held:
            await self._released.wait()

    def _acquire(self, wanted: Mapping[str, int]) -> HostTables:
        return {group: self._pools[group].acquire(number) for group, number in wanted.items()}

    def _has(self, wanted: Mapping[str, int]) -> bool:
        return all(self._pools[group].num_free >= number for group, number in wanted.items())

    def _busy(self, wanted: Mapping[str, int]) -> LocalError:
        free = ", ".join(f"{self._pools[group].num_free} of group '{group}'" for group in wanted)
        return LocalError(
            f"the host buffer is full: {dict(wanted)} blocks are wanted, free are {free}, and "
            f"{self.num_waiting} requests wait",
            code=ErrorCode.BUSY,
            num_waiting=self.num_waiting,
        )
