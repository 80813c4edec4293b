"""A story tells what happened to an entry, in order and bounded, and keeps nothing else alive."""

import gc
import weakref

from kvbus.errors import ErrorCode, LocalError
from kvbus.table import MAX_STEPS, Story


class Wanted:
    """An event that holds something large."""

    error = None


class Failed:
    """An event with an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Report:
    """A command."""


def test_each_step_has_its_time_its_event_the_state_and_the_commands() -> None:
    story = Story()
    story.note(7.0, Wanted(), "reading", [Report(), Report()])
    story.note(7.25, Failed(LocalError("no", code=ErrorCode.BUSY)), "failed", [], "leg 3")

    assert list(story.lines()) == [
        "+0.000000 s  Wanted -> reading: Report, Report",
        "+0.250000 s  leg 3 Failed (busy: no) -> failed: -",
    ]


def test_the_oldest_steps_are_forgotten() -> None:
    story = Story()
    for step in range(MAX_STEPS + 5):
        story.note(float(step), Wanted(), f"state {step}", [])

    lines = list(story.lines())

    assert len(lines) == MAX_STEPS
    assert "state 5" in lines[0]
    assert f"state {MAX_STEPS + 4}" in lines[-1]


def test_events_errors_and_commands_are_not_kept_alive() -> None:
    story, event, command = Story(), Failed(LocalError("no")), Report()
    things: list[object] = [event, event.error, command]
    kept = [weakref.ref(thing) for thing in things]
    story.note(0.0, event, "failed", [command])

    del event, command, things
    gc.collect()

    assert [ref() for ref in kept] == [None] * 3
