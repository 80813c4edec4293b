"""Drives a sans-IO table: events in, commands out, and an alarm for its next deadline.

Refuses to nest: an event that a command causes waits until the commands before it are done.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

E_contra = TypeVar("E_contra", contravariant=True)
E = TypeVar("E")
C = TypeVar("C")


class Drivable(Protocol[E_contra, C]):
    """What a sans-IO state machine looks like from outside."""

    def handle(self, event: E_contra, now: float) -> list[C]:
        """Apply an event at a time; what is to be done about it."""
        ...

    def next_deadline(self) -> float | None:
        """When to tell the table that time went by."""
        ...


class Alarm(Protocol):
    """A call that a clock has been asked for."""

    def cancel(self) -> None:
        """Do not make it."""
        ...


class Clock(Protocol):
    """What a driver needs of an event loop."""

    def time(self) -> float:
        """Now, in seconds."""
        ...

    def call_at(self, when: float, callback: Callable[[], Any], /) -> Alarm:
        """Have ``callback`` called at ``when``."""
        ...


class Driver(Generic[E, C]):
    """Feeds ``table``, and hands each command to the one of ``commands`` for its class.

    All in the event loop's thread. ``on_settled`` is called when all that an event led to is done.
    """

    def __init__(
        self,
        table: Drivable[E, C],
        commands: Mapping[type[C], Callable[[Any], None]],
        *,
        deadline_passed: E,
        on_settled: Callable[[], None],
        loop: Clock,
    ) -> None:
        self._table, self._commands = table, commands
        self._deadline_passed, self._on_settled = deadline_passed, on_settled
        self._loop = loop
        self._events: deque[E] = deque()
        self._running = False
        self._alarm: Alarm | None = None
        self._alarm_at: float | None = None

    @property
    def now(self) -> float:
        """The clock of every time that the table sees, in seconds."""
        return self._loop.time()

    def dispatch(self, event: E) -> None:
        """Apply ``event`` and everything that follows from it."""
        self._events.append(event)
        if self._running:
            return
        self._running = True
        try:
            while self._events:
                for command in self._table.handle(self._events.popleft(), self.now):
                    self._commands[type(command)](command)
        finally:
            self._running = False
            self._set_alarm()
        self._on_settled()

    def stop(self) -> None:
        """No alarm from now on."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _set_alarm(self) -> None:
        """Keep one timer, never later than the next deadline; an early one only looks again."""
        when = self._table.next_deadline()
        if when is None or (
            self._alarm is not None and self._alarm_at is not None and self._alarm_at <= when
        ):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = when
        self._alarm = self._loop.call_at(when, self._ring)

    def _ring(self) -> None:
        self._alarm = self._alarm_at = None
        self.dispatch(self._deadline_passed)
