"""Fair queues: the most urgent first, owner by owner, and no starvation."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import LocalError
from kvbus.fair import FAIR_TURN, FairPool, FairQueue, Key, Permits
from tests.support.examples import num_examples

PRIORITIES = st.integers(-2, 2) | st.integers(-(2**31), 2**31 - 1)
KEYS = st.builds(Key, st.sampled_from("abc"), PRIORITIES)
FEW_KEYS = st.builds(Key, st.sampled_from("abc"), st.integers(0, 2))
STEPS = st.lists(st.none() | FEW_KEYS | FEW_KEYS | st.integers(0, 99), max_size=120)
"""Take, add with that key, or discard one."""


@given(STEPS)
def test_turns_are_those_of_plain_lists(steps: list[Any]) -> None:
    """The oracle knows when each priority, and each owner of one, was last served or came."""
    queue = FairQueue[int]()
    waiting: list[tuple[Key, int]] = []
    since: dict[Any, int] = {}
    num_taken = 0
    for number, step in enumerate(steps):
        if isinstance(step, Key):
            for name in (step.priority, step):
                if not any(name in (key, key.priority) for key, _ in waiting):
                    since[name] = number
            queue.add(step, number)
            waiting.append((step, number))
        elif waiting and step is None:
            num_taken += 1
            priorities = {key.priority for key, _ in waiting}
            is_fair = num_taken % FAIR_TURN == 0
            level = min(priorities, key=since.__getitem__) if is_fair else max(priorities)
            keys = {key for key, _ in waiting if key.priority == level}
            chosen = next(one for one in waiting if one[0] == min(keys, key=since.__getitem__))
            since[level] = since[chosen[0]] = number
            waiting.remove(chosen)
            assert queue.take() == chosen
        elif waiting:
            queue.discard(*waiting.pop(step % len(waiting)))
        assert len(queue) == len(waiting)


def pool_of(
    num_slots: int, *waiting: Any, may: Callable[[int, int], bool] = lambda *_: True
) -> FairPool[Any]:
    pool = FairPool[Any](num_slots, may_have=may)
    for owner, item, *priority in waiting:
        pool.add(Key(owner, *priority), item)
    return pool


def less_than_are_free(num_held: int, num_free: int) -> bool:
    return num_held < num_free


def served(pool: FairPool[Any]) -> list[Any]:
    order = []
    while (granted := pool.acquire()) is not None:
        order.append(granted[0])
        pool.release(granted[1])
    return order


def test_owners_take_turns_urgent_items_first_and_leavers_none() -> None:
    waiting = [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5)]
    without_first = pool_of(1, *waiting)
    without_first.discard(Key("a"), 1)
    assert served(pool_of(1, *waiting)) == [1, 4, 2, 5, 3]
    assert served(without_first) == [2, 4, 3, 5]
    assert served(pool_of(1, ("a", 1), ("b", 2), ("b", 3, 1), ("c", 4, 2))) == [4, 3, 1, 2]


@given(st.lists(KEYS, min_size=1, max_size=20), KEYS)
def test_every_item_gets_slot_within_bounded_turns(before: list[Key], key: Key) -> None:
    pool = pool_of(1)
    for number, one in enumerate(before):
        pool.add(one, number)
    pool.add(key, "it")
    num_priorities = len({one.priority for one in (*before, key)}) + 1
    num_owners = len({one.owner for one in before if one.priority == key.priority}) + 1
    num_own = before.count(key) + 1
    for number in range(FAIR_TURN * num_priorities * num_owners * num_own):
        pool.add(Key("later", 2**31 - 1), -1 - number)
        granted = pool.acquire()
        assert granted is not None
        item, slot = granted
        pool.release(slot)
        if item == "it":
            return
    pytest.fail("it was not served")


@pytest.mark.parametrize(
    ("num_slots", "taken"), [(1, [1, 0]), (2, [1, 1, 0]), (3, [2, 1, 0]), (16, [8, 4, 2, 1, 1, 0])]
)
def test_owner_keeping_slots_leaves_half_of_the_rest(num_slots: int, taken: list[int]) -> None:
    pool = pool_of(num_slots, may=less_than_are_free)
    slots: list[int] = []
    for owner, more in zip("abcdef", taken, strict=False):
        for item in range(40):
            pool.add(Key(owner, 99 - item), (owner, item))
        granted = list(iter(pool.acquire, None))
        slots += [slot for _, slot in granted]
        assert [item[0] for item, _ in granted] == more * [owner]
    assert len(set(slots)) == len(slots) == pool.num_in_use


@given(
    st.lists(st.sampled_from("abc"), min_size=30, max_size=60), st.randoms(use_true_random=False)
)
def test_every_slot_has_one_holder_and_comes_back_once(owners: list[str], luck: Any) -> None:
    pool = pool_of(5, *((owner, item) for item, owner in enumerate(owners)), may=less_than_are_free)
    held: list[int] = []
    while pool or held:
        held += [slot for _, slot in iter(pool.acquire, None)]
        assert len(set(held)) == len(held) == pool.num_in_use
        slot = held.pop(luck.randrange(len(held)))
        pool.release(slot)
        with pytest.raises(KeyError):
            pool.release(slot)
    assert pool.num_in_use == 0


PARTIES = st.integers(0, 4)
MOST = 6


@settings(deadline=None, max_examples=num_examples(200))
@given(st.lists(st.tuples(st.sampled_from(["enter", "leave"]), PARTIES), min_size=20, max_size=90))
def test_an_equal_share_is_neither_refused_nor_lost(steps: list[tuple[str, int]]) -> None:
    places: Permits[tuple[int, int]] = Permits(MOST)
    held: dict[int, list[tuple[int, int]]] = {tenant: [] for tenant in range(5)}
    for number, (step, tenant) in enumerate(steps):
        if step == "leave":
            if held[tenant]:
                gone = held[tenant].pop(0)
                places.release(gone)
                places.release(gone)  # twice is once
            continue
        wanted = tenant, number
        before, num_parties = len(held[tenant]), sum(map(bool, held.values())) + (not held[tenant])
        is_full = len(places) == MOST
        try:
            lost = places.acquire(tenant, wanted)
        except LocalError:
            assert is_full
            assert before + 1 > MOST // num_parties
            continue
        held[tenant].append(wanted)
        assert (lost is not None) == is_full
        if lost is not None:
            assert held[lost[0]].pop() == lost
            assert len(held[lost[0]]) >= len(held[tenant])
        assert len(places) == sum(map(len, held.values())) <= MOST
        assert all(one in places for things in held.values() for one in things)
