"""A history reads as spans: one for each stay in a state, with what ended it."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.agent import spans
from kvbus.agent.spans import FORGOTTEN, PENDING, SENDING
from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol import Span
from kvbus.table.table import MAX_STEPS, History


class Came:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


class Begin: ...


class End: ...


BUSY = Came(LocalError("no", code=ErrorCode.BUSY))
READING = spans.Reading(ends=("over",), cuts=(Begin,), names={("read", "copy"): "scatter"})


def history(*steps: Any) -> History:
    """A history of steps (time, state, commands, the part that they are about, event)."""
    told, defaults = History(), ((), "", Came())
    for step in steps:
        full: Any = (*step, *defaults[len(step) - 2 :])
        now, state, commands, about, event = full
        told.note(now, event, state, [kind() for kind in commands], about)
    return told


STORIES = {
    "a span for each stay, and none for an end": (
        history((1.0, "wait"), (2.0, "wait"), (3.0, "read"), (5.0, "over"), (6.0, "over")),
        [Span("wait", 1.0, 3.0), Span("read", 3.0, 5.0)],
    ),
    "a new span of the same state from a command that cuts": (
        history((1.0, "read", [Begin]), (2.0, "read"), (3.0, "read", [Begin]), (4.0, "over")),
        [Span("read", 1.0, 3.0), Span("read", 3.0, 4.0)],
    ),
    "parts have spans of their own, and names by the state before": (
        history(
            (1.0, "read", [], "transfer 0"),
            (1.5, "copy", [], "transfer 1"),
            (2.0, "copy", [], "transfer 0"),
            (3.0, "over", [], "transfer 1"),
        ),
        [
            Span("read", 1.0, 2.0, 0, "transfer 0"),
            Span("copy", 1.5, 3.0, 0, "transfer 1"),
            Span("scatter", 2.0, None, 0, "transfer 0"),
        ],
    ),
    "a stay of no time is a span only if it ended in an error": (
        history((1.0, "wait"), (1.0, "read"), (1.0, "over", [], "", BUSY)),
        [Span("read", 1.0, 1.0, 0, "", "busy: no")],
    ),
}


@pytest.mark.parametrize(("told", "expected"), STORIES.values(), ids=STORIES)
def test_the_stays_of_a_history_are_its_spans(told: History, expected: list[Span]) -> None:
    assert spans.state_spans(told, READING, depth=0) == expected


def test_the_time_before_the_steps_that_are_kept_is_a_span() -> None:
    short = history((1.0, "read"), (2.0, "over"))
    long = history(*((float(at), f"state {at}") for at in range(MAX_STEPS + 5)))
    assert spans.forgotten_span(short, depth=1) == []
    assert spans.forgotten_span(long, depth=1) == [Span(FORGOTTEN, 0.0, 5.0, 1)]


def test_begin_and_end_commands_are_paired_in_order() -> None:
    told = history((1.0, "a", [Begin]), (2.0, "a", [Begin]), (3.0, "a", [End, End, End, Begin]))
    leased = spans.command_spans(told, Begin, End, name="leased", depth=1)
    times = (1.0, 3.0), (2.0, 3.0), (3.0, None)
    assert leased == [Span("leased", start_s, end_s, 1) for start_s, end_s in times]


def test_child_follows_parent_and_open_span_leaves_no_last_end() -> None:
    parents = [Span("p", 1.0, 2.0), Span("q", 2.0, 3.0)]
    children = [Span("a", 1.0, 1.5, 1), Span("b", 2.5, 2.6, 1)]
    assert [span.name for span in spans.nested(parents, children)] == ["p", "a", "q", "b"]
    assert spans.nested(parents, []) == parents
    assert spans.last_end([*parents, *children]) == 3.0
    assert spans.last_end([*parents, Span("c", 1.0)]) is None
    assert spans.last_end([]) is None


@given(requested_at=st.none() | st.floats() | st.floats(70.0, 130.0))
def test_way_to_agent_is_a_span_if_asked_before_start(requested_at: float | None) -> None:
    """The time of an engine with another clock is used only where it is possible."""
    begun = history((100.0, "wait"), (110.0, "over"))
    can_be = requested_at is not None and 0 < 100.0 - requested_at <= 3600.0
    expected = [Span(SENDING, requested_at or 0.0, 100.0, 1)] if can_be else []
    assert spans.sending_span(begun, requested_at, depth=1) == expected


@pytest.mark.parametrize("wanted_at", [None, 99.0, 101.0, 99.0 - 1e6, math.nan])
def test_the_wait_before_the_engine_asked_is_a_span_if_it_can_be(wanted_at: float | None) -> None:
    expected = [Span(PENDING, 99.0, 100.0)] if wanted_at == 99.0 else []
    assert spans.pending_span(wanted_at, Span(SENDING, 100.0, 101.0, 1)) == expected
