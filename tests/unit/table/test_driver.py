"""The driver runs all commands of an event, in order, whatever fails in between."""

from collections.abc import Callable
from typing import Any

import pytest

from kvbus.table.table import Deadlines, Driver, Promise


class Clock:
    """A loop whose time stands still; it keeps alarms and callbacks."""

    def __init__(self) -> None:
        self.alarms: list[float] = []
        self.soon: list[Callable[[], object]] = []

    def time(self) -> float:
        return 1.0

    def call_at(self, when: float, _: Callable[[], Any]) -> Any:
        self.alarms.append(when)

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> Any:
        self.soon.append(callback)


class Plan:
    """A table whose events are the commands that they lead to."""

    def __init__(self) -> None:
        self.deadlines: Deadlines[str] = Deadlines()

    def handle(self, event: list[Any], now: float) -> list[Any]:
        self.deadlines.set("", now + 1.0)
        return event


class PutOff(Plan):
    """A table whose next event moves the deadline for which an alarm was just set."""

    def handle(self, event: list[Any], now: float) -> list[Any]:
        self.deadlines.set("", now + event.pop() if event else None)
        return [event] if event else []


class FailError(Exception):
    pass


Promised = Promise[Any]


def driver(
    do: Callable[[Any, Promised], None] = lambda *_: None,
) -> tuple[Driver[Any], list[Any], Clock]:
    """Strings are noted, a list is another event, an integer fails, and a float promises one."""
    clock, done = Clock(), list[Any]()
    one: Driver[Any] = Driver(Plan(), clock)  # type: ignore[arg-type] # less than a table

    def fail(number: int) -> None:
        raise FailError(number)

    one.commands |= {str: done.append, list: one.dispatch, int: fail}
    one.promise(float, do, lambda number, error: [f"{number} failed: {error}"])
    return one, done, clock


def test_effects_of_command_come_after_commands_beside_it() -> None:
    one, done, _ = driver()
    one.dispatch(["a", ["b", ["c"], "d"], "e"])
    assert done == ["a", "e", "b", "d", "c"]


@pytest.mark.parametrize("numbers", [[1], [1, 2]])
def test_a_command_that_fails_leaves_none_out_and_is_raised(numbers: list[int]) -> None:
    one, done, clock = driver()
    with pytest.raises((FailError, ExceptionGroup)) as failure:
        one.dispatch(["a", *numbers, ["c"], "b"])
    group = failure.value.exceptions if isinstance(failure.value, ExceptionGroup) else None
    assert [error.args for error in group or [failure.value]] == [(number,) for number in numbers]
    assert done == ["a", "b", "c"]
    assert clock.alarms[0] == 2.0


@pytest.mark.parametrize(("puts_off", "alarms"), [([5.0, 1.0], [6.0]), ([9.0, 1.0, 2.0], [10.0])])
def test_deadline_put_off_at_once_sets_no_alarm(puts_off: list[float], alarms: list[float]) -> None:
    clock = Clock()
    one: Driver[Any] = Driver(PutOff(), clock)  # type: ignore[arg-type] # less than a table
    one.commands[list] = lambda rest: one.dispatch(rest) if rest else None
    one.dispatch(puts_off)
    assert clock.alarms == alarms


def test_a_promise_is_kept_at_once_later_or_with_a_failure() -> None:
    later: list[Promised] = []

    def keep(number: float, promise: Promised) -> None:
        if number == 1.5:
            promise(["at once"])
        elif number == 2.5:
            later.append(promise)
        else:
            raise FailError("no")

    one, done, _ = driver(keep)
    one.dispatch([1.5, 2.5, 3.5, "a"])
    assert done == ["a", "at once", "3.5 failed: no"]
    later.pop()(["later"])
    assert done[3:] == ["later"]


def test_second_event_of_command_is_defect_and_changes_nothing() -> None:
    def answer_twice(_: float, promise: Promised) -> None:
        promise(["first"])
        promise(["second"])

    def fail_late(_: float, promise: Promised) -> None:
        promise(["first"])
        promise.fail(FailError())
        raise FailError("late")

    for do, error in ((answer_twice, RuntimeError), (fail_late, FailError)):
        one, done, _ = driver(do)
        with pytest.raises(error):
            one.dispatch([1.5, "a"])
        assert done == ["a", "first"]


def test_a_promise_that_is_lost_fails_by_itself_in_the_loop() -> None:
    one, done, clock = driver()
    one.dispatch([1.5, "a"])
    assert done == ["a"]
    for call in clock.soon:
        call()
    assert done == ["a", "1.5 failed: a command was dropped without its event"]
