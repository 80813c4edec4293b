"""The staging slots of this agent: bounded, given out in the order in which they were asked for.

Refuses to take a slot back while anything can write into it: who took it gives it back then.
"""

import asyncio
from collections import deque

from kvbus.agent.staging import StagingMemory


class SlotRing:
    """All fetches share the slots; each asks for one at a time, so they take turns."""

    def __init__(self, staging: StagingMemory) -> None:
        self.staging = staging
        self._free = deque(range(staging.num_slots))
        self._waiting: deque[asyncio.Future[int]] = deque()

    @property
    def num_in_use(self) -> int:
        """Slots that somebody has."""
        return self.staging.num_slots - len(self._free)

    def take(self) -> "asyncio.Future[int]":
        """The number of a slot, now or later; a future that was settled otherwise gets none."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self._free:
            future.set_result(self._free.popleft())
        else:
            self._waiting.append(future)
        return future

    def give(self, slot: int) -> None:
        """The slot is free again."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(slot)
                return
        self._free.append(slot)
