"""A session with the agent, in a thread of its own, opened again whenever it was lost.

Refuses to make the engine wait: what its threads ask for is posted, and done with whatever session
there is then; with None when there is none.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from kvbus.engine.session import EngineSession
from kvbus.errors import KVBusError

logger = logging.getLogger("vllm.kvbus")

RETRY_S = 0.5
CLOSE_WITHIN_S = 3.0

S = TypeVar("S", bound=EngineSession)
OpenSession = Callable[[], AbstractAsyncContextManager[S]]


class AgentLink(Generic[S]):
    """Keeps what ``open_session`` gives open until `close`; ``what`` names it in logs.

    ``open_session`` is entered anew after each loss, in the thread of the link; when it raises
    `KVBusError`, it is tried again.
    """

    def __init__(self, what: str, open_session: OpenSession[S]) -> None:
        self._what, self._open_session = what, open_session
        self._on_up: list[Callable[[S], None]] = []
        self._loop = asyncio.new_event_loop()
        self._keeper = self._loop.create_task(self._keep())
        self._tasks: TaskGroup | None = None
        self._posted: deque[Callable[[S | None], None]] = deque()
        self._has_posts = asyncio.Event()
        self._is_up = threading.Event()
        self._problem = "it was not tried yet"
        self.session: S | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvbus-{what}", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why there is no session; empty while there is one."""
        return "" if self._is_up.is_set() else self._problem

    def wait_up(self, timeout_s: float) -> bool:
        """Whether there was a session within ``timeout_s``."""
        return self._is_up.wait(timeout_s)

    def when_up(self, call: Callable[[S], None]) -> None:
        """Have ``call``, too, called in the link's thread with each session from now on."""
        self._on_up.append(call)

    def post(self, call: Callable[[S | None], None]) -> None:
        """Have ``call`` called in the link's thread, after all that was posted before."""
        self._posted.append(call)
        self._loop.call_soon_threadsafe(self._has_posts.set)

    def spawn(self, call: Callable[[], Awaitable[None]]) -> None:
        """From the link's thread: run ``call`` there; what it raises of ours is logged."""
        if self._tasks is not None:
            self._tasks.start_soon(self._guarded, call)

    def close(self) -> None:
        """Close the session and end the thread; idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._keeper.cancel)
            self._thread.join(CLOSE_WITHIN_S)

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._keeper)
        finally:
            self._loop.close()

    async def _keep(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._serve)
            while True:
                await self._hold()
                await anyio.sleep(RETRY_S)

    async def _serve(self) -> None:
        """What was posted, in order; in a task, as what it starts belongs to the task group."""
        while True:
            await self._has_posts.wait()
            self._has_posts.clear()
            while self._posted:
                self._do(self._posted.popleft())

    async def _hold(self) -> None:
        """One session, from its opening to its loss."""
        try:
            async with self._open_session() as session:
                self.session = session
                for call in self._on_up:
                    call(session)
                self._is_up.set()
                self._problem = ""
                logger.info("kvbus: %s is open", self._what)
                error = await session.ended()
                self._say(error, "lost")
        except KVBusError as error:
            self._say(error, "cannot be opened")
        except Exception:  # a fault of ours must not end the link: the next session is a new one
            logger.exception("kvbus: %s failed", self._what)
        finally:
            self._is_up.clear()
            self.session = None

    def _say(self, error: KVBusError, how: str) -> None:
        """Once for each reason: it is tried again and again."""
        if error.message != self._problem:
            logger.warning(
                "kvbus: %s %s: %s [%s]; it is tried again every %s s",
                self._what,
                how,
                error.message,
                error.code,
                RETRY_S,
            )
        self._problem = error.message

    def _do(self, call: Callable[[S | None], None]) -> None:
        try:
            call(self.session)
        except Exception as error:  # one call fails alone, be it by a fault of ours
            self._say_failed(error)

    async def _guarded(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except Exception as error:  # one task fails alone
            self._say_failed(error)

    def _say_failed(self, error: Exception) -> None:
        if isinstance(error, KVBusError):
            logger.error("kvbus: %s: %s [%s]", self._what, error.message, error.code)
        else:
            logger.error("kvbus: %s failed", self._what, exc_info=error)
