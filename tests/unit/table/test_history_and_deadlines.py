"""The history and the deadline of each entry are in order and bounded."""

import gc
import tracemalloc
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import ErrorCode, LocalError
from kvbus.table.table import MAX_STEPS, Deadlines, History
from tests.support.examples import num_examples

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["set", "discard", "pop_due"]),
        st.integers(0, 5),
        st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0]),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=num_examples(200))
@given(STEPS)
def test_deadlines_agree_with_a_dict_after_every_step(steps: list[tuple[str, int, float]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    oracle: dict[int, float] = {}
    for step, key, when in steps:
        if step == "set":
            deadlines.set(key, when)
            oracle[key] = when
        elif step == "discard":
            deadlines.set(key, None)
            oracle.pop(key, None)
        else:
            popped = list(deadlines.pop_due(when))
            due = {key: oracle.pop(key) for key in list(oracle) if oracle[key] <= when}
            assert sorted(popped) == sorted(due)
            assert [due[key] for key in popped] == sorted(due.values())
        assert deadlines.next() == min(oracle.values(), default=None)


def test_key_set_while_due_ones_pop_is_popped_once_per_setting() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("renewed", 1.0)
    due = deadlines.pop_due(2.0)
    first = next(due)
    deadlines.set("renewed", 2.0)
    assert [first, *due] == ["renewed", "renewed"]
    assert deadlines.next() is None


def test_a_deadline_that_moves_for_ever_takes_bounded_memory() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("first", 0.5)
    tracemalloc.start()
    for turn in range(10_000):
        deadlines.set("renewed", 1.0 + turn)
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept_bytes < 20_000
    assert list(deadlines.pop_due(20_000.0)) == ["first", "renewed"]


class Wanted:
    """An event that may have an error, and a command."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


def test_history_keeps_last_steps_as_text_without_their_objects() -> None:
    history = History()
    event, command = Wanted(LocalError("no", code=ErrorCode.BUSY)), Wanted()
    things: list[object] = [event, event.error, command]
    kept = [weakref.ref(thing) for thing in things]
    history.note(7.0, Wanted(), "reading", [command, command])
    history.note(7.25, event, "failed", [], "transfer 3")
    del event, command, things
    gc.collect()
    lines = list(history.lines())
    for step in range(MAX_STEPS):
        history.note(8.0 + step, Wanted(), f"state {step}", [])
    last = list(history.lines())
    assert [ref() for ref in kept] == [None] * 3
    assert lines == [
        "+0.000000 s  Wanted -> reading: Wanted, Wanted",
        "+0.250000 s  transfer 3 Wanted (busy: no) -> failed: -",
    ]
    assert len(last) == MAX_STEPS
    assert "state 0" in last[0]
    assert f"state {MAX_STEPS - 1}" in last[-1]
