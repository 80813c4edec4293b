"""The waterfall has a line for each span, or for many that are alike, where it lies in time."""

import pytest
from rich.console import Console

from kvbus.protocol import AgentRole, Span
from kvbus.trace import Timeline
from kvbus.trace.waterfall import BAR, reasons, waterfall
from tests.trace.traces import REASON, agent, failed_fetch, fetch, offer, unread_offer


def drawn(timeline: Timeline, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(waterfall(timeline, width=width))
    return capture.get().splitlines()


def test_each_span_has_its_name_its_times_and_a_bar_where_it_lies() -> None:
    lines = drawn(Timeline.of([offer(), fetch()], now_s=20.0))

    (waiting,) = [line for line in lines if line.strip().startswith("waiting")]
    assert waiting.split()[:3] == ["waiting", "2000.000", "2500.000"]
    (whole,) = [line for line in lines if line.strip().startswith("offer")]
    start = whole.index(BAR)
    assert waiting.index(BAR) > start
    assert all(len(line) <= 80 and "…" not in line for line in lines)


def test_many_spans_that_are_alike_are_one_line() -> None:
    legs = [Span("READ", 1.0 + n, 2.0 + n, 2, f"leg {n}") for n in range(9)]
    whole = Span("fetch", 0.0, 10.0), Span("reading", 1.0, 10.0, 1)

    lines = drawn(Timeline.of([agent(AgentRole.DECODE, *whole, *legs)], now_s=20.0))

    (line,) = [line for line in lines if "READ" in line]
    assert line.split()[:5] == ["READ", "x", "9", "1000.000", "9000.000"]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_long_reason_takes_no_room_from_names_and_numbers(width: int) -> None:
    lines = drawn(Timeline.of([unread_offer(), failed_fetch()], now_s=30.0), width)

    rows = {line.split()[0]: line.split()[1:3] for line in lines if line.strip()}
    assert rows["span"] == ["from", "ms"]
    assert rows["sealed"] == ["0.000", "22837.028"]
    assert rows["claiming"] == ["22001.000", "0.700"]
    assert {"prefill", "decode"} <= rows.keys()
    assert all(len(line) <= width and "…" not in line for line in lines)


def test_what_ended_spans_is_said_once_with_the_innermost() -> None:
    whole, *others = failed_fetch().spans
    leg = Span("READ", 22.001, 22.0015, 2, "leg 1", "transfer_failed: no route")

    timeline = Timeline.of([agent(AgentRole.DECODE, whole, *others, leg)], now_s=30.0)

    assert reasons(timeline) == {
        REASON: "claiming",
        "transfer_failed: no route": "READ leg 1",
    }
