"""Numbers from samples: quantiles, the comparison of two alternating series, histogram deltas."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The smallest sample that at least ``fraction`` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two series of seconds from alternating rounds; a ratio is the speed beside the baseline's."""

    baseline_s: Sequence[float]
    ours_s: Sequence[float]

    @property
    def baseline_median_s(self) -> float:
        """The baseline's median."""
        return statistics.median(self.baseline_s)

    @property
    def our_median_s(self) -> float:
        """Our median."""
        return statistics.median(self.ours_s)

    @property
    def ratio_of_medians(self) -> float:
        """What a typical round reaches of a typical round."""
        return self.baseline_median_s / self.our_median_s

    @property
    def median_ratio(self) -> float:
        """The median over rounds: what hits both halves of a round cancels out."""
        pairs = zip(self.baseline_s, self.ours_s, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def added_counts(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float]:
    """What two looks at a cumulative histogram lie apart; keys are upper bounds of buckets."""
    return {bound: count - before.get(bound, 0.0) for bound, count in after.items()}


def histogram_quantile(cumulative: Mapping[float, float], fraction: float) -> float:
    """A quantile from a cumulative histogram, taken as evenly spread within its bucket.

    NaN without samples; the last finite bound when the quantile lies beyond it.
    """
    bounds = sorted(cumulative)
    rank = fraction * cumulative[bounds[-1]] if bounds else 0.0
    below, below_count = 0.0, 0.0
    for bound in bounds:
        count = cumulative[bound]
        if count and count >= rank:
            if math.isinf(bound):
                return below
            return below + (bound - below) * (rank - below_count) / (count - below_count or 1.0)
        below, below_count = bound, count
    return math.nan
