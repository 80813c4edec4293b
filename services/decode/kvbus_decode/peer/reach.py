"""Whether a peer that left requests without an answer is asked again: now, later, or by one alone.

Refuses clocks and random numbers: times come in, and the jitter with them.

                 requests time out in a row                   time to try
    answering ───────────────────────────────▶ silent ──────────────────────────▶ tried
        ▲                                        ▲    pauses double, with jitter    │
        │                                        └──────────────────────────────────┤ times out
        └───────────────────────────────────────────────────────────────────────────┘
                              anything that is heard of it, at once
"""

from dataclasses import dataclass
from enum import StrEnum

NUM_TIMEOUTS = 3
"""So many in a row, with nothing heard meanwhile."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
TRIAL_S = 5.0
"""A trial that came to no end, as its fetch was cancelled, is followed by another one."""


class ReachState(StrEnum):
    """What is thought of a peer."""

    ANSWERING = "answering"
    SILENT = "silent"
    """Nothing is asked of it before the pause is over."""

    TRIED = "tried"
    """One may ask, the others wait for what comes of that."""


@dataclass(slots=True)
class Reach:
    """One peer; ``next_at`` is when it is tried, or the next may try.

    ``num_refused`` were turned away since it was last heard.
    ``boot`` is the process that is asked; None while none was heard of.
    """

    state: ReachState = ReachState.ANSWERING
    num_timeouts: int = 0
    num_refused: int = 0
    pause_s: float = FIRST_PAUSE_S
    next_at: float = 0.0
    heard_at: float = float("-inf")
    boot: str | None = None

    def is_new(self, boot: str) -> bool:
        """Whether ``boot`` is another process than the one asked, of which nothing is known yet."""
        self.boot = self.boot or boot
        return self.boot != boot

    def hear(self, at: float) -> None:
        """Something came from the peer at ``at``; what is older than the last is no news."""
        if at <= self.heard_at:
            return
        self.heard_at, self.state = at, ReachState.ANSWERING
        self.num_timeouts, self.num_refused, self.pause_s = 0, 0, FIRST_PAUSE_S

    def time_out(self, asked_at: float, now: float, *, jitter: float) -> None:
        """A request of ``asked_at`` has had no answer; ``jitter`` is from 0 to 1."""
        if self.heard_at >= asked_at or self.state is ReachState.SILENT:
            return
        self.num_timeouts += 1
        if self.state is ReachState.TRIED:
            self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        elif self.num_timeouts < NUM_TIMEOUTS:
            return
        self.state = ReachState.SILENT
        self.next_at = now + self.pause_s * (1 + jitter) / 2

    def admit(self, now: float) -> float:
        """0 for who may ask it now; else the seconds until somebody may."""
        if self.state is ReachState.ANSWERING:
            return 0.0
        if now < self.next_at:
            self.num_refused += 1
            return self.next_at - now
        self.state, self.next_at = ReachState.TRIED, now + TRIAL_S
        return 0.0
