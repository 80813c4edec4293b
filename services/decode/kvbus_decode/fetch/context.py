"""What the handlers of the fetch table get and give: the time and the bounds in, commands out.

Refuses a clock: a `Context` is made from the time that comes with an event.
"""

from dataclasses import dataclass

from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import FetchEntry, FetchLimits

Commands = list[ev.Command]


@dataclass(frozen=True, slots=True)
class Context:
    """What a handler may know of the world: the time, and the bounds of the table."""

    now: float
    limits: FetchLimits

    def timeout_s(self, fetch: FetchEntry) -> float:
        """How long one request of ``fetch`` may take."""
        return max(1e-3, min(self.limits.request_timeout_s, fetch.deadline - self.now))
