"""What must be true at every step of a world, and the error that says what is not.

Invariants, by their numbers in `INVARIANTS`, are held against what the agents say to each other and
to the engines, never against what their tables believe.
"""

from typing import Protocol

INVARIANTS = {
    1: "blocks of an offer are never reported released while a lease on them is live",
    2: "a fetch is completed only if the offer was live when it confirmed, with the offer's bytes",
    3: "blocks of a fetch are never handed back while a read may still land",
    4: "every offer and every fetch ends exactly once, within its deadline",
    5: "what an old process or an old lease says changes nothing",
    6: "tables and pools are bounded, and full is said",
    8: "one bad request fails alone",
    10: "what is in flight is driven until it has landed",
}


class Storied(Protocol):
    """What has been through something."""

    def story(self) -> list[str]:
        """A line for each step."""
        ...


class Violation(AssertionError):
    """An invariant does not hold; ``stories`` are those of the entries that are concerned."""

    def __init__(self, number: int, what: str, stories: tuple[str, ...] = ()) -> None:
        super().__init__(f"invariant {number} ({INVARIANTS[number]}): {what}")
        self.number, self.what, self.stories = number, what, stories


def check(holds: object, number: int, what: str, *about: Storied, **values: object) -> None:
    """Raise `Violation` unless ``holds``; ``what`` names ``values`` in braces.

    The story of each of ``about`` goes with it.
    """
    if not holds:
        stories = tuple(line for one in about for line in one.story())
        raise Violation(number, what.format(**values), stories)
