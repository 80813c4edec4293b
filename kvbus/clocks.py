"""Clock offset of an agent, from the times of a request and its reply (pure).

The midpoint of our times is wrong by at most half the round trip.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exchange:
    sent_s: float
    theirs_s: float
    received_s: float

    @property
    def took_s(self) -> float:
        return self.received_s - self.sent_s


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """``offset_s`` converts their times to ours, with an error of at most ``error_s``."""

    offset_s: float
    error_s: float

    @classmethod
    def of(cls, exchanges: Iterable[Exchange]) -> "ClockOffset":
        best = min(exchanges, key=lambda one: one.took_s)
        return cls((best.sent_s + best.received_s) / 2 - best.theirs_s, best.took_s / 2)
