"""Slots in fair turn: all are used, and no key keeps the others from having any."""

from random import Random

import pytest

from kvbus.table import FairPool


def pool_of(num_slots: int) -> FairPool[str, int]:
    """A key may have one more as long as it holds less than are free."""
    return FairPool(num_slots, may_have=lambda held, free: held < free)


def wait_for(pool: FairPool[str, int], key: str, *items: int) -> None:
    for item in items:
        pool.wait(key, item)


def acquire(pool: FairPool[str, int]) -> tuple[int, int]:
    granted = pool.acquire()
    assert granted is not None
    return granted


def acquire_all(pool: FairPool[str, int]) -> list[tuple[int, int]]:
    """(item, slot) of everybody that gets one now."""
    return list(iter(pool.acquire, None))


@pytest.mark.parametrize(("num_slots", "of_one"), [(1, 1), (2, 1), (3, 2), (4, 2), (16, 8)])
def test_one_key_has_half_of_the_slots_at_most(num_slots: int, of_one: int) -> None:
    pool = pool_of(num_slots)
    wait_for(pool, "a", *range(40))

    slots = [slot for _, slot in acquire_all(pool)]

    assert len(set(slots)) == len(slots) == of_one == pool.num_in_use
    assert pool.num_waiting == 40 - of_one


def test_each_key_that_keeps_its_slots_leaves_half_of_the_rest() -> None:
    pool = pool_of(16)
    taken = []

    for key in "abcdef":
        wait_for(pool, key, *range(40))
        taken.append(len(acquire_all(pool)))

    assert taken == [8, 4, 2, 1, 1, 0]


def test_keys_that_wait_get_slots_in_turn() -> None:
    pool = FairPool[str, int](2, may_have=lambda _held, _free: True)
    wait_for(pool, "a", 1, 2, 3)
    wait_for(pool, "b", 4, 5)

    order = []
    for _ in range(5):
        item, slot = acquire(pool)
        order.append(item)
        pool.release(slot)

    assert order == [1, 4, 2, 5, 3]


def test_who_left_gets_no_slot() -> None:
    pool = pool_of(2)
    wait_for(pool, "a", 1, 2)
    wait_for(pool, "b", 3)

    pool.leave("a", 1)

    assert acquire(pool)[0] == 2
    assert acquire(pool)[0] == 3
    assert pool.acquire() is None


def test_a_slot_comes_back_once() -> None:
    pool = pool_of(2)
    wait_for(pool, "a", 1)
    _, slot = acquire(pool)
    pool.release(slot)

    with pytest.raises(KeyError):
        pool.release(slot)


@pytest.mark.parametrize("seed", range(20))
def test_every_slot_has_one_holder_and_all_come_back(seed: int) -> None:
    random, pool = Random(seed), pool_of(5)
    for item in range(60):
        pool.wait(random.choice("abc"), item)
    held: list[int] = []

    while pool.num_waiting or held:
        held += [slot for _, slot in acquire_all(pool)]
        assert len(set(held)) == len(held) == pool.num_in_use
        pool.release(held.pop(random.randrange(len(held))))

    assert pool.num_in_use == 0
