"""A session in a thread of its own, kept open there (`KeptSession`).

the engine's threads              the session's thread
start, post, close ───calls────▶ event loop ─▶ KeptSession
session, problem ◀───look-ups──────┘
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from kvbus.engine.kept import KeptSession, OpenSession
from kvbus.engine.session import EngineSession
from kvbus.errors import ClosedError, KVBusError

S = TypeVar("S", bound=EngineSession)
T = TypeVar("T")


class SessionThread(Generic[S]):
    """Keeps what ``open_session`` gives open until `close`; ``name`` names it in logs.

    ``open_session`` is entered in this thread, and ``begin`` awaited there, see `KeptSession`. With
    ``reconnect`` it is entered anew after each loss, and when it raised.
    """

    def __init__(
        self,
        name: str,
        open_session: OpenSession[S],
        *,
        begin: Callable[[S], Awaitable[None]] | None = None,
        reconnect: bool = False,
        logger: logging.Logger = logging.getLogger("kvbus.engine"),  # noqa: B008 - one for all
    ) -> None:
        self._name, self._logger = name, logger
        self._is_open = threading.Event()
        self._first: Future[S] = Future()
        self._waiting: set[Future[Any]] = set()
        self._kept = KeptSession(
            open_session,
            begin=begin,
            name=name,
            reconnect=reconnect,
            on_change=self._note,
            logger=logger,
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._loop = asyncio.new_event_loop()
        self._keeper = self._loop.create_task(self._keep())
        self._thread = threading.Thread(target=self._run, name=f"kvbus-{name}", daemon=True)
        self._thread.start()

    @property
    def session(self) -> S | None:
        """The one that is open, None while there is none."""
        return self._kept.session

    @property
    def latest(self) -> S:
        """The last one, lost or not; raises `ClosedError` before the first."""
        return self._kept.latest

    @property
    def num_opened(self) -> int:
        """How often there was a new session, the first included."""
        return self._kept.num_opened

    @property
    def problem(self) -> KVBusError | None:
        """Why there is no session; None while there is one."""
        return self._kept.problem

    def wait_open(self, timeout_s: float) -> bool:
        """Whether there was a session within ``timeout_s``."""
        return self._is_open.wait(timeout_s)

    def wait_first(self) -> S:
        """The first session; raises what its opening raised."""
        return self._first.result()

    def when_open(self, call: Callable[[S], None]) -> None:
        """Have ``call``, too, called in this thread with each session from now on."""
        self._kept.when_open(call)

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
        async with asyncio.TaskGroup() as self._tasks:
            await self._kept.run()

    def _note(self) -> None:
        """There is a session, or there is none any more."""
        session, problem = self._kept.session, self._kept.problem
        if session is not None:
            self._is_open.set()
        else:
            self._is_open.clear()
        if not self._first.done():
            if session is not None:
                self._first.set_result(session)
            elif problem is not None:
                self._first.set_exception(problem)

    def _do(self, call: Callable[[S | None], None]) -> None:
        try:
            call(self._kept.session)
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
