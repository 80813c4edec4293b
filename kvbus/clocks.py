"""Where the clock of an agent lies on ours, from the times of a question and its answer (pure).

    ours     sent ──────────────┬────────────── received
                  └ question ▶  │  ▶ answer ┘
    theirs         ──────────▶ now ◀─────────

The agent read its clock somewhere between the two. In the middle of them is the best guess, which
is wrong by half of the time between them at most, whatever the two ways took.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question: when it was sent and its answer came by our clock, and theirs in between."""

    sent_s: float
    theirs_s: float
    received_s: float

    @property
    def took_s(self) -> float:
        """Its round trip."""
        return self.received_s - self.sent_s


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """``offset_s`` is to be added to a time of theirs; it is wrong by ``error_s`` at most."""

    offset_s: float
    error_s: float

    @classmethod
    def of(cls, exchanges: Iterable[Exchange]) -> "ClockOffset":
        """By the quickest of the exchanges, of which there is one at least."""
        best = min(exchanges, key=lambda one: one.took_s)
        return cls((best.sent_s + best.received_s) / 2 - best.theirs_s, best.took_s / 2)
