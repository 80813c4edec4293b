"""The life of whatever owns sockets: runs in one task, fails once, closes once; and its timers.

Sending is allowed before `run`, from the same thread; timers begin with it.
"""

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

import anyio

from kvbus.errors import ClosedError, LocalError


class Timers:
    """Calls back at or after points of `now`; used from the thread of its event loop only."""

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
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

    def at(self, when: float, callback: Callable[..., None], *arguments: object) -> None:
        """Make a call once, when the clock has reached ``when``."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, callback, arguments))
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
                _, _, callback, arguments = heapq.heappop(heap)
                callback(*arguments)
        except Exception as error:  # a bug of ours: it must end the owner, not the loop's handler
            self._on_failure(error)
        self._arm()


class SocketActor:
    """Base of the ends of the bus; the asyncio backend of anyio is needed."""

    def __init__(self) -> None:
        self.timers = Timers(self._fail)
        self.closed = False
        self._failure: Exception | None = None
        self._failed: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Own the sockets until cancelled; raises only what a callback without ``on_fault`` did."""
        if self.closed:
            raise ClosedError(f"{type(self).__name__} is closed")
        if self._failed is not None:
            raise LocalError(f"{type(self).__name__} runs already")
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        try:
            self.timers.start(loop)
            self._start(loop)
            if self._failure is not None:
                raise self._failure
            await self._failed
        finally:
            try:
                with anyio.CancelScope(shield=True):
                    await self._on_close()
            finally:
                self.close()

    def close(self) -> None:
        """Close the sockets, after ending what is pending; `run` calls it. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._close()
        self.timers.stop()

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _on_close(self) -> None:
        """Last words before closing; not cancelled, so it must be short."""

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError
