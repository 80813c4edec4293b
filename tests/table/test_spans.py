"""A story reads as spans: one for each stay in a state, with what ended it."""

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol import Span
from kvbus.table import (
    ASKED,
    FORGOTTEN,
    MAX_STEPS,
    PENDING,
    TELLING,
    Reading,
    Story,
    command_spans,
    forgotten_span,
    last_end,
    nested,
    pending_span,
    state_spans,
    way_spans,
)


class Came:
    """An event."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


class Begin:
    """A command."""


class End:
    """Another one."""


READING = Reading(ends=("over",), cuts=(Begin,), names={("read", "copy"): "scatter"})


def story(*steps: Any) -> Story:
    told = Story()
    for step in steps:
        now, state, *more = step
        told.note(now, Came(), state, [kind() for kind in more[0]] if more else [], *more[1:])
    return told


def test_each_stay_in_a_state_is_a_span_and_ends_are_none() -> None:
    told = story((1.0, "wait"), (2.0, "wait"), (3.0, "read"), (5.0, "over"), (6.0, "over"))

    assert state_spans(told, READING, depth=1) == [
        Span("wait", 1.0, 3.0, 1),
        Span("read", 3.0, 5.0, 1),
    ]


def test_a_command_that_cuts_begins_a_new_span_of_the_same_state() -> None:
    told = story((1.0, "read", [Begin]), (2.0, "read"), (3.0, "read", [Begin]), (4.0, "over"))

    assert [(s.start_s, s.end_s) for s in state_spans(told, READING, depth=0)] == [
        (1.0, 3.0),
        (3.0, 4.0),
    ]


def test_parts_of_a_story_have_spans_of_their_own_and_names_by_the_state_before() -> None:
    told = story(
        (1.0, "read", [], "leg 0"),
        (1.5, "copy", [], "leg 1"),
        (2.0, "copy", [], "leg 0"),
        (3.0, "over", [], "leg 1"),
    )

    assert state_spans(told, READING, depth=0) == [
        Span("read", 1.0, 2.0, 0, "leg 0"),
        Span("copy", 1.5, 3.0, 0, "leg 1"),
        Span("scatter", 2.0, None, 0, "leg 0"),
    ]


def test_what_ended_a_stay_is_its_error_however_short_it_was() -> None:
    told = story((1.0, "read"))
    told.note(1.0, Came(LocalError("no", code=ErrorCode.BUSY)), "over", [])

    assert state_spans(told, READING, depth=0) == [Span("read", 1.0, 1.0, 0, "", "busy: no")]


def test_a_stay_of_no_time_is_no_span() -> None:
    told = story((1.0, "wait"), (1.0, "read"), (2.0, "over"))

    assert [span.name for span in state_spans(told, READING, depth=0)] == ["read"]


def test_the_time_before_the_steps_that_are_kept_is_a_span() -> None:
    short = story((1.0, "read"), (2.0, "over"))
    long = story(*((float(at), f"state {at}") for at in range(MAX_STEPS + 5)))

    assert forgotten_span(short, depth=1) == []
    assert forgotten_span(long, depth=1) == [Span(FORGOTTEN, 0.0, 5.0, 1)]


def test_commands_that_begin_and_end_something_are_paired_in_order() -> None:
    told = story(
        (1.0, "a", [Begin]), (2.0, "a", [Begin]), (3.0, "a", [End]), (4.0, "a", [End, End])
    )
    going_on = story((1.0, "a", [Begin]))

    spans = command_spans(told, Begin, End, name="leased", depth=1)

    assert [(span.start_s, span.end_s) for span in spans] == [(1.0, 3.0), (2.0, 4.0)]
    assert command_spans(going_on, Begin, End, name="leased", depth=1)[0].end_s is None


def test_a_child_comes_behind_the_last_parent_that_began_before_it() -> None:
    parents = [Span("p", 1.0, 2.0), Span("q", 2.0, 3.0)]
    children = [Span("a", 1.0, 1.5, 1), Span("b", 2.5, 2.6, 1)]

    assert [span.name for span in nested(parents, children)] == ["p", "a", "q", "b"]
    assert [span.name for span in nested(parents, [])] == ["p", "q"]


def test_the_last_end_is_none_while_something_goes_on() -> None:
    assert last_end([Span("a", 1.0, 4.0), Span("b", 2.0, 3.0)]) == 4.0
    assert last_end([Span("a", 1.0, 4.0), Span("b", 2.0)]) is None
    assert last_end([]) is None


times = st.floats() | st.floats(70.0, 130.0)


@example(-4000.0, 112.0)
@example(70.0, 112.0)
@example(101.0, 112.0)
@example(99.0, 105.0)
@example(99.0, 112.0)
@example(99.0, 118.0)
@given(asked_at=st.none() | times, told_at=st.none() | times)
def test_ways_are_spans_if_asked_started_ended_told_and_heard_follow_each_other(
    asked_at: float | None, told_at: float | None
) -> None:
    over = story((100.0, "wait"), (110.0, "over"))
    over.told = None if told_at is None else (told_at, 115.0)

    there, back = way_spans(over, asked_at, 110.0, depth=1)

    can_be = asked_at is None or (asked_at < 100.0 and 100.0 - asked_at <= 3600.0)
    can_be &= told_at is None or 110.0 < told_at <= 115.0
    assert there == ([Span(ASKED, asked_at, 100.0, 1)] if can_be and asked_at is not None else [])
    assert back == ([Span(TELLING, 110.0, told_at, 1)] if can_be and told_at is not None else [])


@example(-8.0)
@example(8.0)
@given(offset_s=st.floats(-30.0, 30.0))
def test_of_an_engine_with_another_clock_no_way_is_longer_than_both_were(offset_s: float) -> None:
    """It asked a second before the start, was told a second after the end, and said so at once."""
    over = story((100.0, "wait"), (110.0, "over"))
    over.told = 111.0 + offset_s, 111.0

    there, back = way_spans(over, 99.0 + offset_s, 110.0, depth=1)

    for span in there + back:
        assert span.end_s is not None
        assert span.end_s - span.start_s <= 2.0


def test_there_is_no_way_back_before_the_end() -> None:
    over = story((100.0, "wait"))
    over.told = 101.0, 102.0

    assert way_spans(over, 99.0, None, depth=1) == ([Span(ASKED, 99.0, 100.0, 1)], [])


@pytest.mark.parametrize(
    ("wanted_at", "is_span"),
    [
        (None, False),
        (99.0, True),
        (101.0, False),
        (99.0 - 1e6, False),
        (math.nan, False),
        (-math.inf, False),
    ],
)
def test_the_wait_before_the_engine_asked_is_a_span_if_it_can_be(
    wanted_at: float | None, is_span: bool
) -> None:
    expected = [Span(PENDING, wanted_at, 100.0)] if is_span and wanted_at is not None else []

    assert pending_span(wanted_at, Span(ASKED, 100.0, 101.0, 1)) == expected
