"""How bytes, times, rates and lists of numbers are written for people."""

import pytest

from kvbus.text import bytes_text, numbers_text, rate_text, time_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.9766 KiB"), (64 << 10, "64 KiB"), (3 << 39, "1.5 TiB")],
)
def test_bytes_have_four_digits_and_a_binary_unit(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(9.314e9, "9.31 GB/s"), (1e9, "1 GB/s"), (85e7, "850 MB/s")]
)
def test_rates_have_three_digits(rate: float, text: str) -> None:
    assert rate_text(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1234.5, "1,234 s"), (1.0, "1 s"), (0.01371, "13.7 ms"), (0.4082, "408 ms"), (2e-6, "2 us")],
)
def test_times_have_three_digits_or_more(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([7, 2, 1, 0], "0-2, 7"),
        ([0, 1], "0-1"),
        ([0, 2], "0, 2"),
        ([1, 3, 5, 7], "1-7 by 2"),
    ],
)
def test_numbers_are_intervals_where_they_can_be(numbers: list[int], text: str) -> None:
    assert numbers_text(numbers) == text
