"""The staging slots of this agent: bounded, and shared by all fetches, peer by peer in turn.

Refuses a slot to a peer that has as many as are free: one that stopped while it is read keeps half
of them at most, and the next such one half of the rest. Refuses to take a slot back while anything
can write into it: who took it gives it back then.
"""

import asyncio
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable

from kvbus.agent.staging.slot_memory import SlotMemory


class SlotRing:
    """Each fetch asks for one slot at a time, for what it reads from one peer."""

    def __init__(self, staging: SlotMemory) -> None:
        self.staging = staging
        self._free = deque(range(staging.num_slots))
        self._held_by: dict[int, Hashable] = {}
        self._num_held: defaultdict[Hashable, int] = defaultdict(int)
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[int]]] = OrderedDict()

    @property
    def num_in_use(self) -> int:
        """Slots that somebody has."""
        return len(self._held_by)

    def take(self, peer: Hashable) -> "asyncio.Future[int]":
        """The number of a slot, now or later; a future that was settled otherwise gets none."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append(future)
        self._hand_out()
        return future

    def give(self, slot: int) -> None:
        """The slot is free again."""
        peer = self._held_by.pop(slot)
        self._num_held[peer] -= 1
        if not self._num_held[peer]:
            del self._num_held[peer]
        self._free.append(slot)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give what is free to those who wait and may have it; who got one is the last to next."""
        while (peer := self._next()) is not None:
            slot = self._free.popleft()
            self._held_by[slot] = peer
            self._num_held[peer] += 1
            self._waiting[peer].popleft().set_result(slot)
            self._waiting.move_to_end(peer)

    def _next(self) -> Hashable | None:
        for peer, futures in list(self._waiting.items()):
            while futures and futures[0].done():
                futures.popleft()
            if not futures:
                del self._waiting[peer]
            elif self._num_held.get(peer, 0) < len(self._free):
                return peer
        return None
