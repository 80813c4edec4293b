"""How much is measured: rounds, and a scale that makes everything smaller for a test.

Refuses figures of a scaled run as results: its sizes are not those of the targets.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """``scale`` 1 is the real thing; ``rounds`` counts pairs of a raw and a kvbus transfer."""

    rounds: int = 30
    scale: float = 1.0

    def count(self, full: int, *, at_least: int = 2) -> int:
        """A number of things, scaled."""
        return max(at_least, round(full * self.scale))

    def seconds(self, full: float) -> float:
        """A duration, scaled."""
        return max(0.2, full * self.scale)
