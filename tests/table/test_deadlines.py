"""Deadlines, against a dict that is searched from end to end."""

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.table import Deadlines
from tests.examples import num_examples

KEYS = st.integers(0, 5)
TIMES = st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, TIMES),
        st.tuples(st.just("discard"), KEYS, st.just(0.0)),
        st.tuples(st.just("pop_due"), st.just(0), TIMES),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=num_examples(200))
@given(STEPS)
def test_it_agrees_with_a_dict_after_every_step(steps: list[tuple[str, int, float]]) -> None:
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


def test_a_key_that_is_set_while_due_ones_are_popped_is_popped_once_for_each_setting() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("renewed", 1.0)
    popped = []

    for key in deadlines.pop_due(2.0):
        popped.append(key)
        if len(popped) == 1:
            deadlines.set(key, 2.0)

    assert popped == ["renewed", "renewed"]
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
    assert deadlines.next() == 0.5
    assert list(deadlines.pop_due(20_000.0)) == ["first", "renewed"]
