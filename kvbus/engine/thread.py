"""A session with an agent in a thread of its own: kept open, and opened again once it was lost.

the engine's threads              the session's thread
start, post, close ───calls────▶ event loop ─▶ open ─▶ users ─▶ lost ─▶ pause ─┐
session, problem ◀───look-ups──────┘            ▲                              │
                                                └────────── reconnect ─────────┘
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import anyio

from kvbus.engine.session import EngineSession
from kvbus.errors import ClosedError, ErrorCode, KVBusError, LocalError

RETRY_S = 0.1
MAX_RETRY_S = 1.0

S = TypeVar("S", bound=EngineSession)
T = TypeVar("T")
OpenSession = Callable[[], AbstractAsyncContextManager[S]]


class SessionThread(Generic[S]):
    """Keeps what ``open_session`` gives open until `close`; ``name`` names it in logs.

    ``open_session`` is entered in this thread. With ``reconnect`` it is entered anew after each
    loss, and when it raised. ``session`` is the one that is open, None while there is none.
    """

    def __init__(
        self,
        name: str,
        open_session: OpenSession[S],
        *,
        reconnect: bool = False,
        logger: logging.Logger = logging.getLogger("kvbus.engine"),  # noqa: B008 - one for all
    ) -> None:
        self._name, self._open_session = name, open_session
        self._reconnect, self._logger = reconnect, logger
        self._on_open: list[Callable[[S], None]] = []
        self._is_open = threading.Event()
        self._first: Future[S] = Future()
        self._waiting: set[Future[Any]] = set()
        self._problem: KVBusError = ClosedError(f"{name} is not open yet")
        self._last_failure = ""
        self.session: S | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._loop = asyncio.new_event_loop()
        self._keeper = self._loop.create_task(self._keep())
        self._thread = threading.Thread(target=self._run, name=f"kvbus-{name}", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> KVBusError | None:
        """Why there is no session; None while there is one."""
        return None if self._is_open.is_set() else self._problem

    def wait_open(self, timeout_s: float) -> bool:
        """Whether there was a session within ``timeout_s``."""
        return self._is_open.wait(timeout_s)

    def wait_first(self) -> S:
        """The first session; raises what its opening raised."""
        return self._first.result()

    def when_open(self, call: Callable[[S], None]) -> None:
        """Have ``call``, too, called in this thread with each session from now on."""
        self._on_open.append(call)

    def start(self, call: Callable[[], Awaitable[T]]) -> Future[T]:
        """What ``call`` returns in this thread; the future cannot be cancelled."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        self.post(lambda _: self._spawn(partial(_settle, future, call)))
        return future

    def post(self, call: Callable[[S | None], None]) -> None:
        """Have ``call`` called in this thread with the session, after all that was posted before.

        Never waits. Raises `ClosedError` when the thread has ended.
        """
        try:
            self._loop.call_soon_threadsafe(self._do, call)
        except RuntimeError as error:
            raise ClosedError(f"{self._name} is closed") from error

    def spawn(self, call: Callable[[], Awaitable[None]]) -> None:
        """From this thread: run ``call`` here, beside the rest; what it raises is logged."""
        self._spawn(partial(self._guarded, call))

    def close(self, timeout_s: float | None = None) -> None:
        """Close the session and end the thread, within ``timeout_s`` or later; idempotent."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # it ends by itself
                self._loop.call_soon_threadsafe(self._keeper.cancel)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._keeper)
        finally:
            self._loop.close()  # from here on nothing is added to those that wait
            for future in list(self._waiting):
                future.set_exception(ClosedError(f"{self._name} was closed"))

    async def _keep(self) -> None:
        retry_s = RETRY_S
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                was_open = await self._hold()
                if not self._reconnect:
                    await anyio.sleep_forever()
                retry_s = RETRY_S if was_open else min(2 * retry_s, MAX_RETRY_S)
                await anyio.sleep(retry_s)

    async def _hold(self) -> bool:
        """One session, from its opening to its loss; False when it was not opened."""
        try:
            async with self._open_session() as session:
                self._set_open(session)
                self._fail(await session.ended(), "lost")
        except KVBusError as error:
            self._fail(error, "cannot be opened")
        except Exception as error:  # a fault of ours must not end the thread: the next one is new
            self._fail(error, "failed")
        finally:
            was_open = self.session is not None
            self._is_open.clear()
            self.session = None
        return was_open

    def _set_open(self, session: S) -> None:
        self.session = session
        for call in self._on_open:
            call(session)
        self._is_open.set()
        self._last_failure = ""
        self._logger.info("kvbus: %s is open", self._name)
        if not self._first.done():
            self._first.set_result(session)

    def _fail(self, error: Exception, how: str) -> None:
        """Logged once for each reason: it is tried again and again."""
        if not self._first.done():
            self._first.set_exception(error)
        if isinstance(error, KVBusError):
            self._problem = error
        else:
            self._problem = LocalError(str(error), code=ErrorCode.INTERNAL)
        failure = f"{how}: {self._problem.message} [{self._problem.code}]"
        if self._reconnect and failure != self._last_failure:
            message = "kvbus: %s %s; it is tried again"
            self._logger.warning(message, self._name, failure, exc_info=error is not self._problem)
        self._last_failure = failure

    def _do(self, call: Callable[[S | None], None]) -> None:
        try:
            call(self.session)
        except Exception as error:  # a call fails alone, also by a fault of ours
            self._log_failed(error)

    def _spawn(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """asyncio's own group: with sniffio, anyio's starts nothing from a callback."""
        if self._tasks is not None:
            self._tasks.create_task(call())

    async def _guarded(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except Exception as error:  # one task fails alone
            self._log_failed(error)

    def _log_failed(self, error: Exception) -> None:
        if isinstance(error, KVBusError):
            self._logger.error("kvbus: %s: %s [%s]", self._name, error.message, error.code)
        else:
            self._logger.error("kvbus: %s failed", self._name, exc_info=error)


async def _settle(future: Future[T], call: Callable[[], Awaitable[T]]) -> None:
    try:
        future.set_result(await call())
    except Exception as error:
        future.set_exception(error)
