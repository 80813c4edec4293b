"""Deltas and quantiles of histograms, on numbers that a person can check, and by a plain oracle."""

import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.histograms import added_counts, histogram_quantile

BOUNDS = (0.001, 0.01, 0.1, 1.0)


def test_a_histogram_quantile_lies_within_its_bucket() -> None:
    cumulative = {0.001: 0.0, 0.002: 50.0, 0.004: 100.0, math.inf: 100.0}

    assert histogram_quantile(cumulative, 0.5) == pytest.approx(0.002)
    assert histogram_quantile(cumulative, 0.75) == pytest.approx(0.003)


def test_a_histogram_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert histogram_quantile({0.001: 1.0, math.inf: 10.0}, 0.99) == 0.001


def test_a_histogram_without_samples_has_no_quantile() -> None:
    assert math.isnan(histogram_quantile({0.001: 0.0, math.inf: 0.0}, 0.99))


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
