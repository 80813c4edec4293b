"""A session that outlives its agent: opened, and opened again once it was lost.

    open ─▶ begin, or resume ─▶ there ─▶ lost ─▶ closed
     ▲                                             │
     └──────────────── pause ◀─────────────────────┘

It is there when it can be used: its engine, or memory, is registered again by then. What came in
between, see `EngineSession`, goes on with it.
"""

import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, Self, TypeVar

import anyio
from anyio.abc import TaskGroup

from kvbus.engine.session import EngineSession
from kvbus.errors import AgentHungUp, ClosedError, ErrorCode, KVBusError, LocalError, PeerLost

RETRY_S = 0.05
MAX_RETRY_S = 2.0
MAX_ABSENT_RETRY_S = 0.2
"""While nobody listens: an attempt costs next to nothing, and an agent that is back is wanted."""

S = TypeVar("S", bound=EngineSession)
OpenSession = Callable[[], AbstractAsyncContextManager[S]]


def _ignore() -> None: ...


class KeptSession(Generic[S]):
    """Keeps what ``open_session`` gives open within ``async with``; ``name`` names it in logs.

    ``begin`` is awaited with the first session, such as `DecodeSession.register` and its `ready`;
    the later ones `resume` what the one before had. Without it the engine registers the first one
    by hand. ``on_change`` is called when there is a session, and when there is none any more.

    What was begun with a session that is lost ends as that session says, once: an offer is
    released, a fetch has failed with stage ``lost``.

    Memory that a `MemorySession` allocates must outlive it: give it ``storages``.
    """

    def __init__(
        self,
        open_session: OpenSession[S],
        *,
        begin: Callable[[S], Awaitable[None]] | None = None,
        name: str = "the session",
        on_change: Callable[[], None] = _ignore,
        logger: logging.Logger = logging.getLogger("kvbus.engine"),  # noqa: B008 - one for all
    ) -> None:
        self._open_session, self._begin = open_session, begin
        self._name, self._logger = name, logger
        self._on_open: list[Callable[[S], None]] = []
        self._on_change = on_change
        self._tasks: TaskGroup | None = None
        self._changed = anyio.Event()
        self._current: S | None = None
        self._latest: S | None = None
        self._problem: KVBusError = ClosedError(f"{name} is not open yet")
        self._last_failure = ""
        self.num_opened = 0
        """How often there was a new session, the first included."""

    @property
    def session(self) -> S | None:
        """The session that can be used, None while there is none."""
        current = self._current
        return current if current is not None and current.lost is None else None

    @property
    def problem(self) -> KVBusError | None:
        """Why there is no session; None while there is one."""
        current = self._current
        return self._problem if current is None else current.lost

    @property
    def has_failed(self) -> bool:
        """Whether `problem` is why the last attempt failed, or the last session was lost."""
        return self.session is None and self._last_failure != ""

    @property
    def latest(self) -> S:
        """The last session, lost or not: a call of a lost one raises why it ended.

        Raises `ClosedError` before the first.
        """
        if self._latest is None:
            raise ClosedError(f"{self._name} is not open")
        return self._latest

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self.run)
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            tasks.cancel_scope.cancel()
            # told of no exception, it does not wrap the caller's into an ExceptionGroup
            await tasks.__aexit__(None, None, None)

    async def opened(self) -> S:
        """The session, as soon as there is one."""
        while (session := self.session) is None:
            await self._changed.wait()
        return session

    def when_open(self, call: Callable[[S], None]) -> None:
        """Have ``call``, too, called with each session from now on, before others know of it."""
        self._on_open.append(call)

    async def run(self) -> None:
        """Keep a session open until this is cancelled; for those that have no ``async with``."""
        try:
            await self._keep()
        finally:
            self._problem = ClosedError(f"{self._name} was closed")
            if self._latest is not None:
                self._latest.follow_with(None)

    async def _keep(self) -> None:
        retry_s = RETRY_S
        while True:
            num_before = self.num_opened
            await self._hold()
            if self.num_opened > num_before:
                retry_s = RETRY_S
            # not all at once: the engines of one agent miss it in the same moment
            await anyio.sleep(retry_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            retry_s = min(2 * retry_s, self._max_retry_s())

    async def _hold(self) -> None:
        """One session, from its opening to its end."""
        try:
            async with self._open_session() as session:
                session.is_kept = True
                await self._serve(session)
        except KVBusError as error:
            self._fail(error, "cannot be opened")
        except Exception as error:  # a fault of ours must not end the keeper: the next one is new
            self._fail(error, "failed")

    async def _serve(self, session: S) -> None:
        before = self._latest
        if before is not None:
            await session.resume(before)
        elif self._begin is not None:
            await self._begin(session)
        self._set(session)
        if before is not None:
            before.follow_with(session)
        try:
            self._fail(await session.ended(), "lost")
        finally:
            self._current = None

    def _set(self, session: S) -> None:
        self._current = self._latest = session
        self.num_opened += 1
        for call in self._on_open:
            call(session)
        self._last_failure = ""
        self._logger.info("kvbus: %s is open", self._name)
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
        self._on_change()

    def _fail(self, error: Exception, how: str) -> None:
        """Logged once for each reason: it is tried again and again."""
        if isinstance(error, KVBusError):
            self._problem = error
        else:
            self._problem = LocalError(str(error), code=ErrorCode.INTERNAL)
            self._problem.__cause__ = error
        failure = f"{how}: {self._problem.message} [{self._problem.code}]"
        if failure != self._last_failure:
            message = "kvbus: %s %s; it is tried again"
            self._logger.warning(message, self._name, failure, exc_info=error is not self._problem)
        self._last_failure = failure
        self._note_change()

    def _max_retry_s(self) -> float:
        is_absent = isinstance(self._problem, PeerLost) and not isinstance(
            self._problem, AgentHungUp
        )
        return MAX_ABSENT_RETRY_S if is_absent else MAX_RETRY_S
