"""The most urgent first, and nobody waits for ever: turns beside a plain oracle."""

import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.table import FAIR_TURN, FairPool, Turns, UrgentFirst

PRIORITIES = st.integers(-2, 2) | st.integers(-(2**31), 2**31 - 1)
STEPS = st.lists(st.none() | PRIORITIES | st.tuples(st.just("leave"), st.integers(0)), max_size=120)
"""Take, or add with that priority, or have one of those that wait leave."""


@dataclass
class Oracle:
    """(priority, number) of all that wait, as they came."""

    waiting: list[tuple[int, int]] = field(default_factory=list)
    num_turns: int = 0

    def take(self) -> tuple[int, int]:
        self.num_turns += 1
        urgent = max(priority for priority, _ in self.waiting)
        first = next(one for one in self.waiting if one[0] == urgent)
        chosen = self.waiting[0] if self.num_turns % FAIR_TURN == 0 else first
        self.waiting.remove(chosen)
        return chosen


@given(STEPS)
def test_turns_are_those_of_a_plain_list(steps: list[Any]) -> None:
    queue, turns, oracle = UrgentFirst[tuple[int, int]](), Turns(), Oracle()
    for number, step in enumerate(steps):
        if isinstance(step, int):
            queue.add((step, number), step)
            oracle.waiting.append((step, number))
        elif oracle.waiting and step is None:
            assert queue.priority == max(priority for priority, _ in oracle.waiting)
            assert queue.take(fair=turns.next_is_fair()) == oracle.take()
        elif oracle.waiting:
            queue.discard(oracle.waiting.pop(step[1] % len(oracle.waiting)))
        assert len(queue) == len(oracle.waiting)


@given(st.lists(PRIORITIES, min_size=1, max_size=20), st.data())
def test_who_waits_is_served_within_a_bounded_number_of_turns_whatever_comes_later(
    before: list[int], data: st.DataObject
) -> None:
    queue, turns = UrgentFirst[tuple[str, int]](), Turns()
    for number, priority in enumerate(before):
        queue.add(("before", number), priority)
    for _ in range(data.draw(st.integers(0, FAIR_TURN))):
        turns.next_is_fair()
    queue.add(("it", 0), data.draw(PRIORITIES))

    for number in range(FAIR_TURN * (len(before) + 1)):
        queue.add(("later", number), 2**31 - 1)
        if queue.take(fair=turns.next_is_fair()) == ("it", 0):
            return

    pytest.fail("it was not served")


def test_nothing_is_kept_of_those_that_are_gone() -> None:
    queue, turns = UrgentFirst[int](), Turns()
    tracemalloc.start()
    for number in range(5000):
        queue.add(2 * number, 0)
        queue.add(2 * number + 1, 1)
        queue.take(fair=turns.next_is_fair())
        queue.take(fair=True)
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert len(queue) == 0
    assert kept_bytes < 20_000


@given(st.lists(st.tuples(st.sampled_from("abc"), PRIORITIES), min_size=1, max_size=20), st.data())
def test_every_item_is_given_a_slot_within_a_bounded_number_of_turns(
    before: list[tuple[str, int]], data: st.DataObject
) -> None:
    """Keys that come later wait behind; each fair turn takes from the first key its first item."""
    pool = FairPool[str, object](1, may_have=lambda _held, _free: True)
    for number, (key, priority) in enumerate(before):
        pool.wait(key, ("before", number), priority)
    pool.wait(data.draw(st.sampled_from("abcd")), "it", data.draw(PRIORITIES))

    most_of_a_key, num_keys = len(before) + 1, 5
    for number in range(FAIR_TURN * most_of_a_key * num_keys):
        pool.wait("later", number, 2**31 - 1)
        granted = pool.acquire()
        assert granted is not None
        item, slot = granted
        pool.release(slot)
        if item == "it":
            return

    pytest.fail("it was not served")


def test_an_urgent_item_comes_before_those_of_all_keys() -> None:
    pool = FairPool[str, int](1, may_have=lambda _held, _free: True)
    pool.wait("a", 1)
    pool.wait("b", 2)
    pool.wait("b", 3, priority=1)
    pool.wait("c", 4, priority=2)

    order = []
    while (granted := pool.acquire()) is not None:
        order.append(granted[0])
        pool.release(granted[1])

    assert order == [4, 3, 1, 2]


def test_an_urgent_item_gives_its_key_no_more_than_that_may_have() -> None:
    pool = FairPool[str, int](4, may_have=lambda held, _free: held < 1)
    pool.wait("a", 1, priority=9)
    pool.wait("a", 2, priority=9)
    pool.wait("b", 3)

    taken = [item for item, _ in iter(pool.acquire, None)]

    assert taken == [1, 3]
    pool.leave("a", 2)
    assert pool.num_waiting == 0
