"""The rates of an agent: defaults at first, then measured aside, part by part; never a failure."""

import asyncio
import os

import anyio
import pytest
from structlog.testing import capture_logs

from kvbus.agent import Calibration
from kvbus.errors import ErrorCode, LocalError, SegmentError
from kvbus.memory import CopyRates
from kvbus.planning import Rates


class Measured:
    """The rates of an agent, and how often it was told that they are others."""

    def __init__(self) -> None:
        self.num_changes = 0
        self.calibration = Calibration(slots_in_flight=5, on_change=self.change)

    def change(self) -> None:
        self.num_changes += 1

    def measure(self) -> Rates:
        anyio.run(self.calibration.measure_reads, "agent/boot")
        anyio.run(self.calibration.measure_copies)
        return self.calibration.rates


def test_an_agent_gets_the_rates_of_its_machine() -> None:
    for _ in range(5):  # a busy machine may not be measured within the second that it has
        measured = Measured()
        with capture_logs() as logs:
            rates = measured.measure()
        if rates.seconds_per_read != Rates().seconds_per_read:
            break

    assert rates.num_cores == len(os.sched_getaffinity(0))
    assert rates.slots_in_flight == 5
    assert rates.seconds_per_read != Rates().seconds_per_read
    assert rates.gather_bytes_per_s != Rates().gather_bytes_per_s
    assert [(line["event"], line["part"]) for line in logs] == [
        ("rates.measured", "reads"),
        ("rates.measured", "copies"),
    ]
    assert measured.num_changes == 2


def test_what_cannot_be_measured_stays_at_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_reads(_: str) -> None:
        raise LocalError("NIXL was not measured in time", code=ErrorCode.TIMEOUT)

    def no_copies() -> None:
        raise SegmentError("no room")

    monkeypatch.setattr("kvbus.agent.process.calibration.measure_reads", no_reads)
    monkeypatch.setattr("kvbus.agent.process.calibration._measure_copies", no_copies)
    measured = Measured()

    with capture_logs() as logs:
        rates = measured.measure()

    assert rates == Rates(num_cores=rates.num_cores, slots_in_flight=5)
    assert [(line["event"], line["part"], line["code"]) for line in logs] == [
        ("rates.defaulted", "reads", "timeout"),
        ("rates.defaulted", "copies", "segment"),
    ]
    assert measured.num_changes == 0


def test_the_event_loop_does_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(*_: str) -> None:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        seen.append(True)
        raise SegmentError("not now")

    monkeypatch.setattr("kvbus.agent.process.calibration.measure_reads", note)
    monkeypatch.setattr("kvbus.agent.process.calibration._measure_copies", note)

    Measured().measure()

    assert seen == [True, True]


def test_copies_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [
        CopyRates(
            gather_bytes_per_s=rate,
            seconds_per_gathered_run=0.0,
            scatter_bytes_per_s=rate,
            seconds_per_scattered_run=0.0,
        )
        for rate in (2e9, 1e9)
    ]
    monkeypatch.setattr("kvbus.agent.process.calibration._measure_copies", given.pop)
    measured = Measured()

    anyio.run(measured.calibration.measure_copies)
    anyio.run(measured.calibration.measure_copies)

    assert measured.calibration.rates.gather_bytes_per_s == 1e9
    assert len(given) == 1
