"""Requests to an agent, retried while it is busy, or at the next agent.

submit ─▶ sent ─▶ accepted
 ▲      │ busy: a pause; agent ends or is lost: until the next one
 └──────┘ refused: for good, or the time ran out without room or a next agent
"""

import asyncio
import math
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from kvbus.engine.connection import Connection, Events
from kvbus.errors import (
    ClosedError,
    ErrorCode,
    KVBusError,
    LocalError,
    RequestRefused,
    RequestTimeout,
)
from kvbus.protocol.message import Request

SILENT_S = 5.0
FIRST_S, MOST_S = 0.02, 2.0
"""Bounds of this side's pauses; an agent may require longer ones."""
NOT_BEGUN = (ErrorCode.DRAINING, ErrorCode.CLOSED, ErrorCode.STALE)
"""Codes of an agent that ends, or has closed the connection."""

M = TypeVar("M", bound=Request[Any])


def _ignore() -> None: ...


class PendingRequest(Generic[M]):
    def __init__(self, message: M, retry_until: float) -> None:
        self.message, self.retry_until = message, retry_until
        self.own_pause_s = FIRST_S
        self.on_end: Callable[[], None] = _ignore
        """Called at the end, and again if the blocks are free only later."""

    def call_last(self) -> None:
        """Call `on_end` and release it: it may own the engine's handle."""
        on_end, self.on_end = self.on_end, _ignore
        on_end()

    def renew(self) -> None:
        """Update the time that is left, before a retry."""

    def pause_s(self, error: KVBusError, now: float) -> float | None:
        """Return the pause before a retry; None if the error is final, or no time is left."""
        if not isinstance(error, RequestRefused) or error.code is not ErrorCode.BUSY:
            return None
        hint = error.detail.get("retry_after_s")
        hint_s = hint if isinstance(hint, int | float) else 0.0
        least_s = max(self.own_pause_s, hint_s)  # this order, as the hint may be NaN
        self.own_pause_s = min(MOST_S, 2 * self.own_pause_s)
        pause_s = least_s * random.uniform(1.0, 2.0)  # noqa: S311 - no secret
        return pause_s if now + pause_s < self.retry_until else None


A = TypeVar("A", bound=PendingRequest[Any])


class RequestRetrier(Events, Generic[A]):
    """The requests of one engine, in the link's event loop.

    After the loss of an agent, the next one is awaited for ``agent_wait_s``.
    """

    def __init__(self, *, agent_wait_s: float = 10.0) -> None:
        self.connection: Connection | None = None
        self.problem: KVBusError = ClosedError("the link is not open")
        self._agent_wait_s, self._lost_at = agent_wait_s, math.inf
        self._is_followed = self._was_silent = False
        self._waiting: dict[A, tuple[asyncio.TimerHandle, KVBusError]] = {}
        """Until the next agent is there or a pause ends; with the reason."""

    def sent(self, one: A, connection: Connection) -> None:
        """Called when the agent may know of the request."""

    def accepted(self, one: A, reply: Any) -> None:
        raise NotImplementedError

    def refused(self, one: A, error: KVBusError) -> None:
        """Called when no agent will get the request."""
        raise NotImplementedError

    def give_up(self, now: float, error: KVBusError) -> None:
        raise NotImplementedError

    def submit(self, one: A) -> None:
        connection = self.connection
        if connection is None:
            self.wait(one, self.problem)
            return
        on_reply = partial(self._on_reply, connection, one)
        try:
            connection.send(one.message, on_reply, timeout_s=math.inf)
        except KVBusError as error:
            self.refused(one, error)
        except Exception as error:  # such as a ticket that cannot be encoded
            self.refused(one, LocalError(f"it cannot be sent: {error}"))
        else:
            self.sent(one, connection)

    def remove(self, one: A) -> bool:
        """Return whether it was waiting, so that no agent knows of it."""
        if one not in self._waiting:
            return False
        timer, _ = self._waiting.pop(one)
        timer.cancel()
        return True

    def opened(self, connection: Connection) -> None:
        self.connection, self._is_followed = connection, True
        connection.events = self
        for one in list(self._waiting):
            self.remove(one)
            self._resubmit(one)

    def closed(self) -> None:
        self._is_followed = False
        for one, (_, error) in list(self._waiting.items()):
            self.remove(one)
            self.refused(one, error)

    # An agent enforces all deadlines itself, unless it is stopped. It is given up after two silent
    # checks in a row. After a pause of this process, the first check runs before the queued
    # messages are read. A stopped agent may resume, and still begin a request, or report an end. So
    # the blocks are free only when it reports that, or exits.
    def on_silence(self, silent_s: float) -> None:
        was_silent, self._was_silent = self._was_silent, silent_s >= SILENT_S
        if was_silent and self._was_silent:
            silence = f"the agent has answered nothing for {silent_s:.0f} s"
            error = RequestTimeout(f"{silence}: how it ended is not known")
            self.give_up(time.monotonic(), error)

    def on_lost(self, error: KVBusError) -> None:
        self.connection, self.problem = None, error
        self._lost_at = time.monotonic()
        for one, (_, why) in list(self._waiting.items()):
            self.remove(one)
            self.wait(one, error if why.code is ErrorCode.BUSY else why)

    def on_refusal(self, connection: Connection, one: A, error: KVBusError) -> None:
        ends = isinstance(error, RequestRefused) and error.code in NOT_BEGUN
        if ends or connection.lost is not None:
            self.wait(one, error)
        elif (pause_s := one.pause_s(error, time.monotonic())) is not None:
            self._later(one, pause_s, partial(self._resubmit, one), error)
        else:
            self.refused(one, error)

    def wait(self, one: A, error: KVBusError) -> None:
        lost_s = time.monotonic() - self._lost_at if self.connection is None else 0.0
        left_s = self._agent_wait_s - max(0.0, lost_s)
        if self._is_followed and left_s > 0:
            self._later(one, left_s, partial(self.refused, one, error), error)
        else:
            self.refused(one, error)

    def _resubmit(self, one: A) -> None:
        one.renew()
        self.submit(one)

    def _on_reply(self, connection: Connection, one: A, reply: Any) -> None:
        if isinstance(reply, KVBusError):
            self.on_refusal(connection, one, reply)
        else:
            self.accepted(one, reply)

    def _later(self, one: A, delay_s: float, call: Callable[[], None], error: KVBusError) -> None:
        def wake() -> None:
            del self._waiting[one]
            call()

        timer = asyncio.get_running_loop().call_later(delay_s, wake)
        self._waiting[one] = timer, error
