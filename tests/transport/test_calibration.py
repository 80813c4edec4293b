"""What READs cost here: measured with real NIXL, and nothing of it is left."""

import gc
import threading
import weakref
from pathlib import Path

import pytest

from kvbus.errors import ErrorCode, LocalError
from kvbus.transport import LONG_BYTES
from kvbus.transport.calibration import MANY, Area, _Pair, fit_reads, measure_reads
from tests.transport.conftest import until


def transport_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvbus-transport"]


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_reads_have_a_price_and_the_bytes_a_speed(
    monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)

    rates = measure_reads("agent/boot", timeout_s=30)

    assert 0 < rates.seconds_per_descriptor < 1e-2
    assert 0 < rates.seconds_per_read < 10
    assert 1e6 < rates.wire_bytes_per_s < 1e13


def test_no_thread_and_no_descriptor_is_left() -> None:
    before = transport_threads()
    measure_reads("agent/boot", timeout_s=30)  # UCX keeps some of its own from then on
    until(lambda: transport_threads() == before)
    num_open = num_open_files()

    measure_reads("agent/boot", timeout_s=30)

    until(lambda: transport_threads() == before)
    until(lambda: num_open_files() <= num_open)


def test_what_takes_too_long_is_a_timeout_and_leaves_nothing() -> None:
    before = transport_threads()

    with pytest.raises(LocalError) as refused:
        measure_reads("agent/boot", timeout_s=0)

    assert refused.value.code is ErrorCode.TIMEOUT
    until(lambda: transport_threads() == before)


def test_a_read_that_is_under_way_at_the_end_of_the_time_keeps_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    areas: list[weakref.ref[object]] = []

    def out_of_time(pair: _Pair) -> list[float]:
        areas.extend(weakref.ref(area.owner) for area in (pair._to, pair._at))
        pair.long_s()  # connects
        pair._deadline = 0.0
        pair.long_s()
        raise AssertionError("it had no time")

    monkeypatch.setattr(_Pair, "measure", out_of_time)
    before = transport_threads()

    with pytest.raises(LocalError, match="not measured in time"):
        measure_reads("agent/boot", timeout_s=30)

    until(lambda: transport_threads() == before)
    until(lambda: gc.collect() >= 0 and [area() for area in areas] == [None, None])


def test_what_is_measured_with_is_small() -> None:
    assert Area.in_host().size_bytes == LONG_BYTES == 8 << 20


def test_the_rates_explain_what_was_measured() -> None:
    rates = fit_reads(few_s=1e-4, many_s=1e-4 + MANY * 2e-6, long_s=1e-4 + LONG_BYTES / 8e9)

    assert rates.seconds_per_read == 1e-4
    assert rates.seconds_per_descriptor == pytest.approx(2e-6)
    assert rates.wire_bytes_per_s == pytest.approx(8e9)


def test_a_disturbed_measurement_still_gives_rates_above_zero() -> None:
    rates = fit_reads(few_s=1.0, many_s=1e-3, long_s=1e-3)

    assert rates.seconds_per_descriptor == pytest.approx(1e-3 / 2 / MANY)
    assert rates.wire_bytes_per_s == pytest.approx(LONG_BYTES / 5e-4)
