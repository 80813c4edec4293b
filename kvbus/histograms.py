"""Quantiles of samples and of cumulative (Prometheus) histograms (pure).

Histogram keys are the upper bounds of buckets; values count all samples up to the bound.
"""

import math
from collections.abc import Collection, Iterable, Mapping

MIN_P99_SAMPLES = 100


def quantile(samples: Iterable[float], fraction: float) -> float:
    """Return the smallest sample that at least ``fraction`` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def p99(samples: Collection[float]) -> float | None:
    """Return None below `MIN_P99_SAMPLES`, where it is the maximum."""
    return quantile(samples, 0.99) if len(samples) >= MIN_P99_SAMPLES else None


def added_counts(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float]:
    return {bound: count - before.get(bound, 0.0) for bound, count in after.items()}


def histogram_quantile(cumulative: Mapping[float, float], fraction: float) -> float:
    """NaN without samples; the last finite bound if the quantile exceeds it."""
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
