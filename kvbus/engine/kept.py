"""A session that outlives its agent: opened, and opened again once it was lost or is replaced.

    open ─▶ begin, or resume ─▶ there ─┬─▶ lost ──────────────────────────────────▶ closed
     ▲                           ▲     └─▶ replaced ─▶ standing by ─┬─▶ settled ────▶ closed
     └──────────── pause ◀───────┼─────────┘                        │
                                 └──────── the next one was lost ◀──┘

Refuses to be there before it can be used: its engine, or memory, is registered again by then.
"""

import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
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
    released, a fetch has failed with stage ``lost``. A session whose agent is being replaced stays
    open beside the next one until all that was begun with it has ended. If the next one is lost
    before, it is the one that can be used again.

    Memory that a `MemorySession` allocates must outlive it: give it ``storages``.
    """

    def __init__(
        self,
        open_session: OpenSession[S],
        *,
        begin: Callable[[S], Awaitable[None]] | None = None,
        name: str = "the session",
        reconnect: bool = True,
        on_change: Callable[[], None] = _ignore,
        logger: logging.Logger = logging.getLogger("kvbus.engine"),  # noqa: B008 - one for all
    ) -> None:
        self._open_session, self._begin = open_session, begin
        self._name, self._reconnect, self._logger = name, reconnect, logger
        self._on_open: list[Callable[[S], None]] = []
        self._on_change = on_change
        self._tasks: TaskGroup | None = None
        self._changed = anyio.Event()
        self._standing_by: list[S] = []
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
            async with anyio.create_task_group() as tasks:
                await self._keep(tasks)
        finally:
            self._problem = ClosedError(f"{self._name} was closed")

    async def _keep(self, tasks: TaskGroup) -> None:
        retry_s = RETRY_S
        while True:
            num_before, next_due = self.num_opened, anyio.Event()
            tasks.start_soon(self._hold, next_due)
            await next_due.wait()
            if not self._reconnect:
                await anyio.sleep_forever()
            if self.num_opened > num_before:
                retry_s = RETRY_S
            # not all at once: the engines of one agent miss it in the same moment
            await anyio.sleep(retry_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            retry_s = min(2 * retry_s, self._max_retry_s())
            if self._current is not None:
                await self._current.superseded()

    async def _hold(self, next_due: anyio.Event) -> None:
        """One session, from its opening to its end; ``next_due`` is set when another is wanted."""
        try:
            async with self._open_session() as session:
                session.follows = self._reconnect
                try:
                    await self._serve(session, next_due)
                finally:
                    self._unset(session)
        except KVBusError as error:
            self._fail(error, "cannot be opened")
        except Exception as error:  # a fault of ours must not end the keeper: the next one is new
            self._fail(error, "failed")
        finally:
            next_due.set()

    async def _serve(self, session: S, next_due: anyio.Event) -> None:
        if self._current is not None and session.has_agent_of(self._current):
            self._current.note_resumed()
            return
        if self._latest is not None:
            await session.resume(self._latest)
        elif self._begin is not None:
            await self._begin(session)
        self._set(session)
        await session.superseded()
        if session.lost is None:
            self._logger.info("kvbus: the agent of %s is being replaced", self._name)
            next_due.set()
            await self._stand_by(session)
        if session.lost is not None and self._current is session:  # else the next one is there
            self._fail(session.lost, "lost")

    async def _stand_by(self, session: S) -> None:
        """Return when the session is lost, or when it is settled and the next one is there."""
        while session.lost is None:
            while self._current is session and session.lost is None:
                await _first(self._changed.wait, session.ended)
            await _first(session.settled, session.ended, partial(self._used_again, session))
            if self._current is not session:
                return

    async def _used_again(self, session: S) -> None:
        while self._current is not session:
            await self._changed.wait()

    def _set(self, session: S) -> None:
        if self._current is not None:
            self._standing_by.append(self._current)
        self._current = self._latest = session
        self.num_opened += 1
        for call in self._on_open:
            call(session)
        self._last_failure = ""
        self._logger.info("kvbus: %s is open", self._name)
        self._note_change()

    def _unset(self, session: S) -> None:
        if session in self._standing_by:
            self._standing_by.remove(session)
        if self._current is session:
            self._current = self._back_in_use()
            self._note_change()

    def _back_in_use(self) -> S | None:
        """The session before the latest, whose agent goes on: it hears that at the same time."""
        live = [session for session in self._standing_by if session.lost is None]
        if not live:
            return None
        self._latest = last = live[-1]
        self._standing_by.remove(last)
        last.note_resumed()
        self._logger.warning("kvbus: %s is used again: its next agent is gone", self._name)
        return last

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
        if self._reconnect and failure != self._last_failure:
            message = "kvbus: %s %s; it is tried again"
            self._logger.warning(message, self._name, failure, exc_info=error is not self._problem)
        self._last_failure = failure
        self._note_change()

    def _max_retry_s(self) -> float:
        is_absent = isinstance(self._problem, PeerLost) and not isinstance(
            self._problem, AgentHungUp
        )
        return MAX_ABSENT_RETRY_S if is_absent else MAX_RETRY_S


async def _first(*calls: Callable[[], Awaitable[object]]) -> None:
    """Return when one of them has."""
    async with anyio.create_task_group() as race:

        async def run(call: Callable[[], Awaitable[object]]) -> None:
            await call()
            race.cancel_scope.cancel()

        for call in calls:
            race.start_soon(run, call)
