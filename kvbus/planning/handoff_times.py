"""What whole handoffs between two engines take, by their bytes: assumed first, then learned.

It reads no clock, and forgets nothing but by what came later.
"""

from collections.abc import Iterable
from math import exp, log, log2

FIXED_S = 1e-3
"""Of a handoff of next to nothing, until one was seen."""
WEIGHT = 0.2
MAX_RATIO = 100.0


class HandoffTimes:
    """Of one pair of engines and one path; only handoffs that were alone are to be observed.

    For each doubling of bytes it keeps the ratio of what was observed to what was assumed (a fixed
    time, and the bytes at ``bytes_per_s``), as a geometric mean with exponential weights. Between
    two sizes that were seen the ratio is drawn as a line over the logarithm of the bytes.
    """

    def __init__(self, *, bytes_per_s: float, fixed_s: float = FIXED_S) -> None:
        self._fixed_s, self._bytes_per_s = fixed_s, bytes_per_s
        self._seen: dict[int, tuple[float, float, int]] = {}
        """By size class: mean log2 of the bytes, mean log of the ratio, how many."""

    @property
    def num_observed(self) -> int:
        """How many handoffs it knows."""
        return sum(number for *_, number in self._seen.values())

    def observe(self, num_bytes: int, seconds: float) -> None:
        """One took so long; of nothing, or in no time, says nothing."""
        if num_bytes <= 0 or seconds <= 0:
            return
        ratio = min(max(seconds / self._assumed_s(num_bytes), 1 / MAX_RATIO), MAX_RATIO)
        at, mean, number = self._seen.get(num_bytes.bit_length(), (0.0, 0.0, 0))
        weight = max(WEIGHT, 1 / (number + 1))
        at += weight * (log2(num_bytes) - at)
        mean += weight * (log(ratio) - mean)
        self._seen[num_bytes.bit_length()] = at, mean, number + 1

    def predict_s(self, num_bytes: int) -> float:
        """What one would take that has nothing beside it."""
        return self._assumed_s(num_bytes) * exp(self._log_ratio(log2(max(1, num_bytes))))

    def moving_s(self, num_bytes: int) -> float:
        """Of that, what its bytes take: the part that others wait for."""
        return max(0.0, self.predict_s(num_bytes) - self.predict_s(1))

    def line(self, num_bytes: int) -> tuple[float, float]:
        """The fixed seconds, and the bytes a second of a handoff of so many."""
        moving_s = self.moving_s(num_bytes)
        return self.predict_s(1), num_bytes / moving_s if moving_s else self._bytes_per_s

    def _assumed_s(self, num_bytes: int) -> float:
        return self._fixed_s + num_bytes / self._bytes_per_s

    def _log_ratio(self, at: float) -> float:
        points = sorted((place, mean) for place, mean, _ in self._seen.values())
        below = [point for point in points if point[0] <= at]
        above = [point for point in points if point[0] > at]
        if not (below and above):
            nearest = below[-1:] or above[:1]
            return nearest[0][1] if nearest else 0.0
        (left, low), (right, high) = below[-1], above[0]
        return low + (high - low) * (at - left) / (right - left)


def queue_s(num_bytes: int, others: Iterable[tuple[HandoffTimes, int, bool]]) -> float:
    """How much longer one takes beside ``others``: their times, bytes left, whether they are ahead.

    Turns are fair: each other one moves as many bytes as this one meanwhile, or what it has left;
    one that is ahead in the queue moves all.
    """
    return sum(
        times.moving_s(left if is_ahead else min(left, num_bytes))
        for times, left, is_ahead in others
    )
