"""Samples, and numbers from them: quantiles, the ratio of two series."""

import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence


async def in_turn(
    rounds: int, ways: Mapping[str, Callable[[], Awaitable[float]]]
) -> dict[str, list[float]]:
    """The seconds of each way, once a round: what disturbs one disturbs its neighbours."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(await way())
    return times


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The smallest sample that at least ``fraction`` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def median_ratio(baseline_s: Sequence[float], ours_s: Sequence[float]) -> float:
    """Our speed beside the baseline's, the median over rounds: what hits both cancels out."""
    pairs = zip(baseline_s, ours_s, strict=True)
    return statistics.median(baseline / ours for baseline, ours in pairs)
