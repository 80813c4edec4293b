"""What the handoffs of a chaos run are to be, drawn by weight.

Plain ones, large ones that are withdrawn or cancelled under the read, second readers, offers that
grow, that live for milliseconds only, tickets that were altered. Those that are met go to both
sides at once, in any order, by a name in place of a ticket.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

from tests.chaos.shapes import LARGE_TOKENS

KINDS = {
    "plain": 30,
    "large": 8,
    "withdrawn": 16,
    "cancelled": 14,
    "second_reader": 6,
    "short_lived": 5,
    "growing": 9,
    "altered": 12,
    "forged": 2,
    "partial": 5,
    "met": 8,
    "met_withdrawn": 4,
    "met_cancelled": 4,
}
SMALL_TOKENS, LARGE = (2, 300), (LARGE_TOKENS // 2, LARGE_TOKENS)
TOKENS = {"large": LARGE, "withdrawn": LARGE, "cancelled": LARGE, "altered": (33, 80)}
"""Altered tickets have more than one block, and so few that they are read without a claim."""
SOONEST_S, LATEST_S = 0.002, 1.0
"""After so long a handoff is withdrawn or cancelled: a read is met on slow machines and fast."""


@dataclass(frozen=True)
class Draw:
    """What one handoff is to be."""

    kind: str
    num_tokens: int
    first_token: int
    ttl_s: float
    timeout_s: float
    act_after_s: float
    releases: bool
    zero_tail: bool
    piece_tokens: int
    steps: tuple[int, ...]

    def order(self) -> dict[str, Any]:
        """The offer, for its engine."""
        return {"do": "offer", "steps": self.steps, "ttl_s": self.ttl_s}

    @property
    def is_met(self) -> bool:
        return self.kind.startswith("met")

    @property
    def is_withdrawn(self) -> bool:
        return self.kind.endswith("withdrawn")

    @property
    def is_cancelled(self) -> bool:
        return self.kind.endswith("cancelled")


def draw_handoff(random: Random) -> Draw:
    """By weight, then by the ranges of its kind."""
    (kind,) = random.choices(list(KINDS), list(KINDS.values()))
    tokens = random.randint(*TOKENS.get(kind, SMALL_TOKENS))
    steps: tuple[int, ...] = (tokens,)
    if kind == "growing" or kind.startswith("met"):
        steps = (*sorted(random.sample(range(1, tokens), min(3, tokens - 1))), tokens)
    return Draw(
        kind=kind,
        num_tokens=tokens,
        first_token=random.randrange(tokens) if kind == "partial" else 0,
        ttl_s=random.uniform(0.001, 0.2) if kind == "short_lived" else random.uniform(4.0, 10.0),
        timeout_s=random.choice([3.0, 6.0, 10.0]),
        act_after_s=SOONEST_S * (LATEST_S / SOONEST_S) ** random.random(),
        releases=random.random() < 0.5,
        zero_tail=random.random() < 0.3,
        piece_tokens=random.choice([0, 0, 128]),
        steps=steps,
    )
