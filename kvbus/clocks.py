"""Clock offset of an agent, from the times of a request and its reply (pure).

    ours     sent ──────────────┬────────────── received
                  └ question ▶  │  ▶ answer ┘
    theirs         ──────────▶ now ◀─────────

The agent read its clock between ``sent`` and ``received``. The midpoint is wrong by at most half
the round trip, however the two ways differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exchange:
    """Times of one request: ours at sending and receipt, theirs between."""

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
        """Use the fastest of the exchanges, at least one."""
        best = min(exchanges, key=lambda one: one.took_s)
        return cls((best.sent_s + best.received_s) / 2 - best.theirs_s, best.took_s / 2)
