import asyncio
from collections.abc import Callable

import anyio

from kvbus.errors import ClosedError, LocalError


class SocketActor:
    """Owner of sockets: it runs in one task, fails once and closes once.

    It can send before `run`, from the same thread.
    """

    def __init__(self) -> None:
        self.closed = False
        self._alarms: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._failure: Exception | None = None
        self._failed: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Raise a callback's error if no ``on_fault`` is set."""
        if self.closed:
            raise ClosedError(f"{type(self).__name__} is closed")
        if self._failed is not None:
            raise LocalError(f"{type(self).__name__} runs already")
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        try:
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
        if self.closed:
            return
        self.closed = True
        self._close()
        for alarm in self._alarms.values():
            alarm.cancel()
        self._alarms.clear()

    def _call_at(self, when: float, callback: Callable[[], None]) -> None:
        if self.closed:
            return
        if callback in self._alarms:
            self._alarms[callback].cancel()
        loop = asyncio.get_running_loop()
        self._alarms[callback] = loop.call_at(when, self._ring, callback)

    def _ring(self, callback: Callable[[], None]) -> None:
        del self._alarms[callback]
        try:
            callback()
        except Exception as error:  # a kvbus bug: fail the owner, not just the loop's handler
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _on_close(self) -> None:
        """Do short work before `close`, shielded from cancellation."""

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError
