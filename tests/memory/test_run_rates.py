"""What copies from blocks into blocks cost here, measured in real shared memory."""

from pathlib import Path

import pytest

from kvbus.memory import run_copy, run_rates
from kvbus.memory.run_rates import (
    BLOCK_BYTES,
    COPY_BYTES,
    SHORT_RUN_BYTES,
    fit_runs,
    measure_runs,
)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "numpy"])
def test_runs_have_a_speed_and_nothing_of_the_measurement_is_left(monkeypatch, kernel):
    if not kernel:
        monkeypatch.setattr(run_copy, "_kernel", None)
    before = len(list(Path("/proc/self/fd").iterdir()))

    rates = measure_runs()

    assert 1e6 < rates.copy_bytes_per_s < 1e13
    assert 0 <= rates.seconds_per_copied_run < 1e-2
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_copies_that_are_timed_are_of_one_size_and_within_the_memory(monkeypatch):
    jobs = []
    monkeypatch.setattr(run_rates, "copy_runs", jobs.extend)

    measure_runs()

    assert {copies.num_bytes for copies in jobs} == {COPY_BYTES}
    assert {copies.run_bytes for copies in jobs} == {BLOCK_BYTES, SHORT_RUN_BYTES}
    for copies in jobs:
        for side in (0, 1):
            first, reach = int(copies.outer[side, 0]), run_rates.MEMORY_BYTES
            runs = copies.addresses()[side]
            assert first <= runs.min() <= runs.max() + copies.run_bytes <= first + reach
            assert len(set(runs.tolist())) == copies.num_runs


def test_the_rates_explain_what_was_measured():
    def seconds(run_bytes: int) -> float:
        return COPY_BYTES / 12e9 + COPY_BYTES / run_bytes * 50e-9

    rates = fit_runs(long_s=seconds(BLOCK_BYTES), short_s=seconds(SHORT_RUN_BYTES))

    assert rates.copy_bytes_per_s == pytest.approx(12e9)
    assert rates.seconds_per_copied_run == pytest.approx(50e-9)


@pytest.mark.parametrize("short_s", [1e-6, 1e3])
def test_a_disturbed_measurement_still_gives_rates_above_zero(short_s):
    rates = fit_runs(long_s=1e-3, short_s=short_s)

    assert COPY_BYTES / 1e-3 <= rates.copy_bytes_per_s <= COPY_BYTES / 5e-4
    assert rates.seconds_per_copied_run >= 0
