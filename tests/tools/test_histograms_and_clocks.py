"""Quantiles of histograms by a plain oracle; the clock of an agent is placed on ours."""

import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.clocks import ClockOffset, Exchange
from kvbus.histograms import added_counts, histogram_quantile

BOUNDS = (0.001, 0.01, 0.1, 1.0)
ways = st.floats(1e-5, 0.5)


@pytest.mark.parametrize(
    ("cumulative", "part", "expected"),
    [
        ({0.001: 0.0, 0.002: 50.0, 0.004: 100.0, math.inf: 100.0}, 0.5, 0.002),
        ({0.001: 0.0, 0.002: 50.0, 0.004: 100.0, math.inf: 100.0}, 0.75, 0.003),
        ({0.001: 1.0, math.inf: 10.0}, 0.99, 0.001),
        ({0.001: 0.0, math.inf: 0.0}, 0.99, math.nan),
    ],
    ids=["at a bound", "within a bucket", "beyond the last bound", "without samples"],
)
def test_a_histogram_quantile_lies_within_its_bucket(
    cumulative: dict[float, float], part: float, expected: float
) -> None:
    assert histogram_quantile(cumulative, part) == pytest.approx(expected, nan_ok=True)


def test_only_what_was_added_between_two_looks_counts() -> None:
    added = added_counts({0.001: 5.0, math.inf: 9.0}, {0.001: 6.0, math.inf: 12.0})

    assert added == {0.001: 1.0, math.inf: 3.0}


@given(st.lists(st.floats(0, 2), min_size=1), st.sampled_from([0.1, 0.5, 0.9, 0.99]))
def test_a_quantile_is_in_the_bucket_of_the_value_of_that_rank(
    values: list[float], part: float
) -> None:
    counts = {b: float(sum(v <= b for v in values)) for b in (*BOUNDS, math.inf)}

    found = histogram_quantile(counts, part)

    ranked = sorted(values)[max(0, math.ceil(part * len(values)) - 1)]
    bucket = bisect_left(BOUNDS, ranked)
    low = BOUNDS[bucket - 1] if bucket else 0.0
    high = BOUNDS[bucket] if bucket < len(BOUNDS) else BOUNDS[-1]
    assert low <= found <= high


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(ways, ways), min_size=1, max_size=8))
def test_clock_error_is_bounded_by_half_of_quickest_round_trip(
    skew_s: float, took: list[tuple[float, float]]
) -> None:
    exchanges = [
        Exchange(float(at), at + there_s + skew_s, at + there_s + back_s)
        for at, (there_s, back_s) in enumerate(took)
    ]

    offset = ClockOffset.of(exchanges)

    assert abs(offset.offset_s + skew_s) <= offset.error_s + 1e-9
    assert offset.error_s <= min(sum(one) for one in took) / 2 + 1e-9
