"""Asks an agent until one has begun what is asked: a busy one again, and the next one when it ends.

ask ─▶ sent ─▶ answered
 ▲      │ busy: a pause; it ends, or is lost: until the next one is there
 └──────┘ no: refused, as when there was no room, or no next one, in time
"""

import asyncio
import math
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from kvbus.engine.connection import Connection, Events
from kvbus.engine.later import Handle
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
"""Pauses of our own choice; an agent may ask for more."""
NOT_BEGUN = (ErrorCode.DRAINING, ErrorCode.CLOSED, ErrorCode.STALE)
"""Codes of an agent that ends, and of one that has taken leave of the connection."""

M = TypeVar("M", bound=Request[Any])


def _ignore(_: object) -> None: ...


class Pending(Handle, Generic[M]):
    """What an agent is asked; one that is busy is asked again until ``ask_until``."""

    def __init__(self, message: M, ask_until: float) -> None:
        self.message, self.ask_until = message, ask_until
        self.own_pause_s = FIRST_S
        self.on_end: Callable[[Any], None] = _ignore
        """Called with this when it has ended, and once more if its blocks are free only later."""

    def renew(self) -> None:
        """It is asked again: it may say that time has passed."""

    def pause_s(self, error: KVBusError, now: float) -> float | None:
        """Seconds to wait; None when ``error`` is another one, or there is no time left.

        Longer from refusal to refusal, so that an agent that stays full is asked ever less.
        """
        if not isinstance(error, RequestRefused) or error.code is not ErrorCode.BUSY:
            return None
        hint = error.detail.get("retry_after_s")
        hint_s = hint if isinstance(hint, int | float) else 0.0
        least_s = max(self.own_pause_s, hint_s)  # in this order: a hint may be no number at all
        self.own_pause_s = min(MOST_S, 2 * self.own_pause_s)
        pause_s = least_s * random.uniform(1.0, 2.0)  # noqa: S311 - no secret
        return pause_s if now + pause_s < self.ask_until else None


A = TypeVar("A", bound=Pending[Any])


class Asking(Events, Generic[A]):
    """What one engine asks of the agent that is there, or of the next one.

    After an agent was lost, the next one is waited for until ``agent_wait_s`` have passed; before
    the first, and when the link is closed, not at all. Called in the link's event loop only.
    """

    def __init__(self, *, agent_wait_s: float = 10.0) -> None:
        self.connection: Connection | None = None
        self.problem: KVBusError = ClosedError("the link is not open")
        self._agent_wait_s, self._lost_at = agent_wait_s, math.inf
        self._is_followed = self._was_silent = False
        self._waiting: dict[A, tuple[asyncio.TimerHandle, KVBusError]] = {}
        """Until the next agent is there, or for a pause; and why."""

    def sent(self, one: A, connection: Connection) -> None:
        """The agent may know of it."""

    def answered(self, one: A, reply: Any) -> None:
        """The agent has said yes."""
        raise NotImplementedError

    def refused(self, one: A, error: KVBusError) -> None:
        """No agent is going to be asked for it any more."""
        raise NotImplementedError

    def give_up(self, now: float, error: KVBusError) -> None:
        """The agent is stopped: what is overdue fails, and its blocks stay in doubt."""
        raise NotImplementedError

    def ask(self, one: A) -> None:
        """Ask the agent that is there, or wait for it."""
        connection = self.connection
        if connection is None:
            self.wait(one, self.problem)
            return
        on_reply = partial(self._on_reply, connection, one)
        try:
            connection.send(one.message, on_reply, timeout_s=math.inf)
        except KVBusError as error:
            self.refused(one, error)
        except Exception as error:  # such as a ticket that no message can carry: this fails alone
            self.refused(one, LocalError(f"it cannot be asked for: {error}"))
        else:
            self.sent(one, connection)

    def forget(self, one: A) -> bool:
        """Whether it waited, so that no agent knows of it; it does not any more."""
        if one not in self._waiting:
            return False
        timer, _ = self._waiting.pop(one)
        timer.cancel()
        return True

    def opened(self, connection: Connection) -> None:
        """There is an agent, of the role that this is for."""
        self.connection, self._is_followed = connection, True
        connection.events = self
        for one in list(self._waiting):
            self.forget(one)
            self._ask_again(one)

    def closed(self) -> None:
        """There is not going to be another agent."""
        self._is_followed = False
        for one, (_, error) in list(self._waiting.items()):
            self.forget(one)
            self.refused(one, error)

    # An agent keeps all deadlines itself, unless it is stopped: then nobody does. It is given up
    # when it was silent twice in a row, so that a process that was held up itself reads what came
    # meanwhile. What it was asked for it may still begin when it goes on, and what it has begun may
    # have ended: so blocks are free when the agent says so after all, or is gone.
    def on_silence(self, silent_s: float) -> None:
        """Give up what is overdue."""
        was_silent, self._was_silent = self._was_silent, silent_s >= SILENT_S
        if was_silent and self._was_silent:
            silence = f"the agent has answered nothing for {silent_s:.0f} s"
            error = RequestTimeout(f"{silence}: how it ended is not known")
            self.give_up(time.monotonic(), error)

    def on_lost(self, error: KVBusError) -> None:
        """What it did not answer waits for the next one."""
        self.connection, self.problem = None, error
        self._lost_at = time.monotonic()
        for one, (_, why) in list(self._waiting.items()):
            self.forget(one)
            self.wait(one, error if why.code is ErrorCode.BUSY else why)

    def on_refusal(self, connection: Connection, one: A, error: KVBusError) -> None:
        """The agent said no, or its answer did not come."""
        ends = isinstance(error, RequestRefused) and error.code in NOT_BEGUN
        if ends or connection.lost is not None:
            self.wait(one, error)
        elif (pause_s := one.pause_s(error, time.monotonic())) is not None:
            self._later(one, pause_s, partial(self._ask_again, one), error)
        else:
            self.refused(one, error)

    def wait(self, one: A, error: KVBusError) -> None:
        """Until the next agent is there; ``error`` is why there is none."""
        lost_s = time.monotonic() - self._lost_at if self.connection is None else 0.0
        left_s = self._agent_wait_s - max(0.0, lost_s)
        if self._is_followed and left_s > 0:
            self._later(one, left_s, partial(self.refused, one, error), error)
        else:
            self.refused(one, error)

    def _ask_again(self, one: A) -> None:
        one.renew()
        self.ask(one)

    def _on_reply(self, connection: Connection, one: A, reply: Any) -> None:
        if isinstance(reply, KVBusError):
            self.on_refusal(connection, one, reply)
        else:
            self.answered(one, reply)

    def _later(self, one: A, delay_s: float, call: Callable[[], None], error: KVBusError) -> None:
        def wake() -> None:
            del self._waiting[one]
            call()

        timer = asyncio.get_running_loop().call_later(delay_s, wake)
        self._waiting[one] = timer, error
