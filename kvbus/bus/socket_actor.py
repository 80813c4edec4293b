"""The life of whatever owns sockets: runs in one task, fails once, closes once.

Refuses to run twice. Sending is allowed before `run`, from the same thread; timers begin with it.
"""

import asyncio

import anyio

from kvbus.bus.timers import Timers
from kvbus.errors import ClosedError, LocalError


class SocketActor:
    """Base of the four ends of the bus; the asyncio backend of anyio is needed."""

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
