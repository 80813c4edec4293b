"""What has ended and waits to be sent, bounded: the event loop puts, the sending thread takes.

Refuses to wait: when it is full, what comes is dropped and counted.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbus.protocol.trace import Span
from kvbus.protocol.traceparent import TraceParent

MAX_WAITING = 2048
SETTLE_S = 0.1
"""For so long the engine may still say when it was told of the end."""
READINGS = {
    "otlp_handoffs": "Offers or fetches whose spans the collector has taken.",
    "otlp_dropped": "Offers or fetches whose spans the collector did not take in time.",
}

MakeSpans = Callable[[], Sequence[Span]]


@dataclass(frozen=True, slots=True)
class Ended:
    """One offer or fetch; its trace is that of ``parent``, or without one is named by ``name``.

    That is the offer's id, or the fetch's where no offer was met.

    The spans are made in the sending thread: an event loop under load has something else to do.
    """

    make_spans: MakeSpans
    parent: TraceParent | None
    name: str
    settled_at: float
    """By `time.monotonic`."""


class SpanOutbox:
    """A queue between two threads."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._waiting: deque[Ended] = deque()  # its ends may be used by two threads at a time
        self._max_waiting = max_waiting
        self.num_sent = self.num_dropped = 0

    def put(self, make_spans: MakeSpans, name: str, *traceparents: str) -> None:
        """Something has ended; it is of the first trace that is one, and of one that is sampled."""
        parent = TraceParent.first_of(*traceparents)
        if parent is not None and not parent.sampled:
            return
        if len(self._waiting) >= self._max_waiting:
            self.num_dropped += 1
            return
        settled_at = time.monotonic() + SETTLE_S
        self._waiting.append(Ended(make_spans, parent, name, settled_at))

    def take(self, most: int, *, settled_by: float) -> list[Ended]:
        """The first of those that wait and have settled by then."""
        taken: list[Ended] = []
        waiting = self._waiting
        while waiting and len(taken) < most and waiting[0].settled_at <= settled_by:
            taken.append(waiting.popleft())
        return taken

    def readings(self) -> dict[str, float]:
        """The readings named in `READINGS`."""
        return {"otlp_handoffs": self.num_sent, "otlp_dropped": self.num_dropped}
