"""How much is measured: rounds, and a factor that makes everything smaller for a test."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """``factor`` 1 is the real thing; ``rounds`` counts pairs of a raw and a kvbus transfer."""

    rounds: int = 30
    factor: float = 1.0

    def count(self, full: int, *, at_least: int = 2) -> int:
        """A number of things, scaled."""
        return max(at_least, round(full * self.factor))

    def seconds(self, full: float) -> float:
        """A duration, scaled."""
        return max(0.2, full * self.factor)
