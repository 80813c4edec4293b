"""Owns the way back: outcomes go from the transport's thread to the thread of the caller.

A callback that raises does not stop those behind it.
"""

from collections import deque
from collections.abc import Callable

from kvbus.transport.types import ReadOutcome

OnEnd = Callable[[ReadOutcome], None]
Deliver = Callable[[Callable[[], None]], object]
"""Runs a function on the caller's thread soon: ``loop.call_soon_threadsafe``."""


def deliver_inline(drain: Callable[[], None]) -> None:
    """Run it at once, on the transport's thread: for callers without an event loop."""
    drain()


class Delivery:
    """Hands over outcomes, with one wake-up of the event loop for all that end meanwhile."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._ended: deque[tuple[OnEnd, ReadOutcome]] = deque()
        self._scheduled = False

    def put(self, on_end: OnEnd, outcome: ReadOutcome) -> None:
        """Hand one over. When the event loop is closed, nobody is left to be told."""
        self._ended.append((on_end, outcome))
        if self._scheduled:
            return
        self._scheduled = True
        try:
            self._deliver(self._drain)
        except RuntimeError:
            self._scheduled = False

    def _drain(self) -> None:
        self._scheduled = False  # first: what is put from here on schedules again
        errors: list[Exception] = []
        while self._ended:
            on_end, outcome = self._ended.popleft()
            try:
                on_end(outcome)
            except Exception as error:  # the rest must still be told
                errors.append(error)
        if errors:
            raise ExceptionGroup("read callbacks failed", errors)
