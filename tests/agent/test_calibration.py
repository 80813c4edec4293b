"""Rates at the start of an agent: measured aside, or the defaults, never a failure."""

import asyncio
import os
from functools import partial

import anyio
import pytest
from structlog.testing import capture_logs

from kvbus.agent.process import calibration
from kvbus.agent.process.calibration import calibrated_rates
from kvbus.errors import ErrorCode, LocalError, SegmentError
from kvbus.planning.cost import Rates


def calibrate() -> Rates:
    return anyio.run(partial(calibrated_rates, "agent/boot", slots_in_flight=5))


def test_an_agent_gets_the_rates_of_its_machine():
    with capture_logs() as logs:
        rates = calibrate()

    assert rates.num_cores == len(os.sched_getaffinity(0))
    assert rates.slots_in_flight == 5
    assert rates.gather_bytes_per_s != Rates().gather_bytes_per_s
    assert logs[-1]["event"] == "rates.measured"


def test_what_cannot_be_measured_is_taken_from_the_defaults(monkeypatch):
    def no_reads(_: str) -> None:
        raise LocalError("NIXL was not measured in time", code=ErrorCode.TIMEOUT)

    def no_copies() -> None:
        raise SegmentError("no room")

    monkeypatch.setattr(calibration, "measure_reads", no_reads)
    monkeypatch.setattr(calibration, "_measure_copies", no_copies)

    with capture_logs() as logs:
        rates = calibrate()

    assert rates == Rates(num_cores=rates.num_cores, slots_in_flight=5)
    assert [(line["event"], line.get("part"), line.get("code")) for line in logs] == [
        ("rates.defaulted", "reads", "timeout"),
        ("rates.defaulted", "copies", "segment"),
        ("rates.measured", None, None),
    ]


def test_the_event_loop_does_not_measure(monkeypatch):
    seen = []

    def note(*_: str) -> None:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        seen.append(True)
        raise SegmentError("not now")

    monkeypatch.setattr(calibration, "measure_reads", note)
    monkeypatch.setattr(calibration, "_measure_copies", note)

    calibrate()

    assert seen == [True, True]
