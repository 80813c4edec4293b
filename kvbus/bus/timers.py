"""The timers of one owner: a heap, and one alarm in the event loop for its earliest entry.

Refuses cancellation: a timer that is no longer wanted fires, and its callback looks and returns.
"""

import asyncio
import heapq
from collections.abc import Callable

OnFailure = Callable[[Exception], None]


class Timers:
    """Calls back at or after points of `now`; used from the thread of its event loop only."""

    def __init__(self, on_failure: OnFailure) -> None:
        self._heap: list[tuple[float, int, Callable[[int], None], int]] = []
        self._count = 0
        self._on_failure = on_failure
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = float("inf")

    def now(self) -> float:
        """The event loop's clock, in seconds."""
        return (self._loop or asyncio.get_running_loop()).time()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to fire; timers may have been set before."""
        self._loop = loop
        self._arm()

    def stop(self) -> None:
        """Fire no more, and let go of what the callbacks hold."""
        self._heap.clear()
        self._loop = None
        if self._alarm is not None:
            self._alarm.cancel()

    def at(self, when: float, callback: Callable[[int], None], key: int = 0) -> None:
        """Call ``callback(key)`` once, when the clock has reached ``when``."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, callback, key))
        if when < self._alarm_at:
            self._arm()

    def _arm(self) -> None:
        if self._loop is None or not self._heap:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = self._heap[0][0]
        self._alarm = self._loop.call_at(self._alarm_at, self._fire)

    def _fire(self) -> None:
        self._alarm, self._alarm_at = None, float("inf")
        now, heap = self.now(), self._heap
        try:
            while heap and heap[0][0] <= now:
                _, _, callback, key = heapq.heappop(heap)
                callback(key)
        except Exception as error:  # a bug of ours: it must end the owner, not the loop's handler
            self._on_failure(error)
        self._arm()
