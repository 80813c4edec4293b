"""Quantiles and comparisons, on numbers that a person can check."""

import pytest

from kvbus.bench.figures import Figure, Target
from kvbus.bench.stats import median_ratio, quantile


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 1.0), (0.5, 50.0), (0.99, 99.0), (1.0, 100.0)]
)
def test_a_quantile_is_a_sample_that_so_many_do_not_exceed(
    fraction: float, expected: float
) -> None:
    samples = [float(number) for number in range(100, 0, -1)]

    assert quantile(samples, fraction) == expected


def test_a_quantile_of_one_sample_is_that_sample() -> None:
    assert quantile([7.0], 0.99) == 7.0


def test_a_ratio_is_our_speed_beside_the_baselines() -> None:
    assert median_ratio([1.0, 2.0, 3.0], [2.0, 2.0, 12.0]) == 0.5


def test_a_figure_at_its_target_meets_it() -> None:
    assert Figure("name", 0.90, "", Target(0.90, at_least=True)).met
    assert Figure("name", 2.0, "ms", Target(2.0)).met
    assert not Figure("name", 2.1, "ms", Target(2.0)).met
    assert Figure("name", 2.1, "ms").met is None
