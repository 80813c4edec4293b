"""Drives a sans-IO table: events in, commands out, and an alarm for its next deadline."""

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from kvbus.table.events import DeadlinePassed, Refuse, SendReply
from kvbus.table.table import Table

E = TypeVar("E")


class Clock(Protocol):
    """What a driver needs of an event loop."""

    def time(self) -> float:
        """Now, in seconds."""
        ...

    def call_at(self, when: float, callback: Callable[[], Any], /) -> Any:
        """Have ``callback`` called at ``when``; the result has a ``cancel``."""
        ...


class Driver(Generic[E]):
    """Feeds ``table``, and hands each command to the one of ``commands`` for its class.

    All in the event loop's thread. Replies go to the call that was asked with; ``commands`` has
    what is done for the others, and is filled by its owner before the first event.
    """

    def __init__(self, table: Table[Any, Any, Any, Any], loop: Clock) -> None:
        self.commands: dict[type[Any], Callable[[Any], None]] = {
            SendReply: _reply,
            Refuse: _refuse,
        }
        self._table, self._loop = table, loop
        self._events: deque[E | DeadlinePassed] = deque()
        self._running = False
        self._alarm: Any = None
        self._alarm_at = float("inf")

    @property
    def now(self) -> float:
        """The clock of every time that the table sees, in seconds."""
        return self._loop.time()

    # Commands may cause events, as a request that cannot be sent fails at once. Those wait until
    # the commands before them are done: the table has been left in the state in which all of them
    # are under way.
    #
    #     dispatch(A) ─▶ handle ─▶ [c1, c2] ─▶ c1 ─▶ dispatch(B): queued
    #                                        ─▶ c2
    #                 ─▶ handle(B) ─▶ ...
    def dispatch(self, event: E | DeadlinePassed) -> None:
        """Apply ``event`` and everything that follows from it; then raise what commands raised."""
        self._events.append(event)
        if self._running:
            return
        self._running, errors = True, list[Exception]()
        try:
            while self._events:
                for command in self._table.handle(self._events.popleft(), self._loop.time()):
                    try:
                        self.commands[type(command)](command)
                    except Exception as error:  # a defect: others may be awaited
                        errors.append(error)
        finally:
            self._running = False
            if self._table.deadlines.bound < self._alarm_at:
                self._set_alarm()
        if errors:
            raise ExceptionGroup("commands failed", errors) if errors[1:] else errors[0]

    def stop(self) -> None:
        """No alarm from now on."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = None, float("-inf")

    def _set_alarm(self) -> None:
        """Keep one timer, never later than the next deadline; an early one only looks again.

        The bound may be that of a deadline which the same event has put off: it is looked at.
        """
        when = self._table.deadlines.next()
        if when is None or when >= self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = self._loop.call_at(when, self._ring), when

    def _ring(self) -> None:
        self._alarm, self._alarm_at = None, float("inf")
        self.dispatch(DeadlinePassed())


def _reply(command: SendReply) -> None:
    command.reply_to.reply(command.body)


def _refuse(command: Refuse) -> None:
    command.reply_to.refuse(command.error)
