"""What gathering and scattering cost here, measured with torch in real shared memory."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvbus.memory import (
    LONG_RUN_BYTES,
    SHORT_RUN_BYTES,
    SLOT_BYTES,
    fit_copies,
    measure_copies,
)


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_copies_have_a_speed_and_runs_may_be_free() -> None:
    rates = measure_copies()

    assert 1e6 < rates.gather_bytes_per_s < 1e13
    assert 1e6 < rates.scatter_bytes_per_s < 1e13
    assert 0 <= rates.seconds_per_gathered_run < 1e-2
    assert 0 <= rates.seconds_per_scattered_run < 1e-2


@pytest.fixture
def three_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(num_threads)


def test_nothing_of_the_measurement_is_left(three_threads: None) -> None:
    measure_copies()
    before = num_open_files(), threading.active_count()

    measure_copies()

    assert (num_open_files(), threading.active_count()) == before
    assert torch.get_num_threads() == 3


def test_copies_are_measured_on_one_core(
    three_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    set_num_threads = torch.set_num_threads

    def note(num: int) -> None:
        asked.append(num)
        set_num_threads(num)

    monkeypatch.setattr(torch, "set_num_threads", note)

    measure_copies()

    assert asked == [1, 3]


def test_the_rates_explain_what_was_measured() -> None:
    def seconds(run_bytes: int) -> float:
        return SLOT_BYTES / 12e9 + SLOT_BYTES / run_bytes * 50e-9

    bytes_per_s, seconds_per_run = fit_copies(
        short_s=seconds(SHORT_RUN_BYTES), long_s=seconds(LONG_RUN_BYTES)
    )

    assert bytes_per_s == pytest.approx(12e9)
    assert seconds_per_run == pytest.approx(50e-9)


@pytest.mark.parametrize("short_s", [1e-6, 1e3])
def test_a_disturbed_measurement_still_gives_rates_above_zero(short_s: float) -> None:
    bytes_per_s, seconds_per_run = fit_copies(short_s=short_s, long_s=1e-3)

    assert SLOT_BYTES / 1e-3 <= bytes_per_s <= SLOT_BYTES / 5e-4
    assert seconds_per_run >= 0
