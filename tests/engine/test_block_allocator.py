"""Free blocks: none twice, none lost, and long runs."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.engine.bounce.host_pool import BlockAllocator
from kvbus.errors import LocalError


@given(num_blocks=st.integers(0, 40), seed=st.integers(), wanted=st.lists(st.integers(0, 12)))
def test_every_block_is_free_or_with_one_owner(num_blocks, seed, wanted):
    random, allocator = Random(seed), BlockAllocator(num_blocks)
    free, owners = set(range(num_blocks)), []
    for number in wanted:
        if owners and random.random() < 0.5:
            given_back = owners.pop(random.randrange(len(owners)))
            random.shuffle(given_back)
            allocator.release(given_back)
            free |= set(given_back)
        if number <= len(free):
            taken = allocator.acquire(number).tolist()
            assert set(taken) <= free
            assert len(set(taken)) == number
            free -= set(taken)
            owners.append(taken)
        else:
            with pytest.raises(LocalError):
                allocator.acquire(number)

        assert allocator.num_free == len(free)

    assert set(allocator.acquire(allocator.num_free).tolist()) == free


def test_a_run_that_is_just_long_enough_is_taken_before_a_longer_one():
    allocator = BlockAllocator(20)
    allocator.acquire(20)
    allocator.release([1, 2, 3])
    allocator.release(range(10, 20))

    assert allocator.acquire(3).tolist() == [1, 2, 3]


def test_without_a_run_that_is_long_enough_the_longest_come_first():
    allocator = BlockAllocator(20)
    allocator.acquire(20)
    allocator.release([0])
    allocator.release([2, 3])
    allocator.release([5, 6, 7])

    assert allocator.acquire(5).tolist() == [5, 6, 7, 2, 3]


def test_neighbours_that_come_back_in_any_order_are_one_run_again():
    allocator = BlockAllocator(8)
    allocator.acquire(8)
    for block in (6, 0, 3, 7, 1, 5, 2, 4):
        allocator.release([block])

    assert allocator.acquire(8).tolist() == list(range(8))


@pytest.mark.parametrize("ids", [[2], [5, 5], [8], [-1], [4, 2]], ids=str)
def test_blocks_that_are_free_or_none_are_not_taken_back(ids):
    allocator = BlockAllocator(8)
    allocator.acquire(8)
    allocator.release([2])

    with pytest.raises(LocalError):
        allocator.release(ids)

    assert allocator.num_free == 1
