"""Host blocks: who gets them, who waits, and which slots are copied, against plain oracles."""

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.engine.bounce import HostPool, block_copies
from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import BlockTable, GroupSpec


@given(num_blocks=st.integers(0, 40), seed=st.integers(), numbers=st.lists(st.integers(0, 12)))
def test_every_block_is_free_or_owned_once(num_blocks: int, seed: int, numbers: list[int]) -> None:
    async def run() -> None:
        random, pool = Random(seed), HostPool({"full": num_blocks})
        free, owned = set(range(num_blocks)), list[list[int]]()
        for number in numbers:
            if owned and random.random() < 0.5:
                released = owned.pop(random.randrange(len(owned)))
                pool.release({"full": np.array(released, dtype=np.uint32)})
                free |= set(released)
            if number <= len(free):
                taken = (await pool.acquire({"full": number}))["full"].tolist()
                assert taken == sorted(free)[:number]
                free -= set(taken)
                owned.append(taken)
            else:
                error = GeometryError if number > num_blocks else LocalError
                with pytest.raises(LocalError) as refused:
                    await pool.acquire({"full": number})
                assert type(refused.value) is error
            assert pool.num_held == num_blocks - len(free)

    anyio.run(run)


@pytest.mark.anyio
async def test_a_request_gets_blocks_of_every_group_or_none() -> None:
    pool = HostPool({"full": 4, "small": 8})
    held = await pool.acquire({"full": 3, "small": 1})
    for wait_s in (0.0, 0.01):
        with pytest.raises(LocalError, match="the host buffer is full") as refused:
            await pool.acquire({"full": 2, "small": 2}, wait_s=wait_s)
        assert refused.value.code is ErrorCode.BUSY
        assert pool.num_held == 4
    with pytest.raises(GeometryError, match="make the host buffer larger"):
        await pool.acquire({"full": 5}, wait_s=60.0)
    pool.release(held)
    assert len((await pool.acquire({"full": 4}))["full"]) == 4


@pytest.mark.anyio
async def test_waiting_requests_get_blocks_in_their_order() -> None:
    pool, order = HostPool({"full": 4}), list[int]()
    held = await pool.acquire({"full": 3})

    async def hold(number: int) -> None:
        tables = await pool.acquire({"full": number}, wait_s=60.0)
        order.append(number)
        pool.release(tables)

    async with anyio.create_task_group() as tasks:
        for number in (4, 1, 2):
            tasks.start_soon(hold, number)
            await anyio.wait_all_tasks_blocked()
        with pytest.raises(LocalError, match="the host buffer is full"):
            await pool.acquire({"full": 1})
        pool.release(held)
    assert order == [4, 1, 2]
    assert pool.num_held == 0


@pytest.mark.anyio
async def test_free_blocks_are_not_released() -> None:
    pool = HostPool({"full": 4})
    held = await pool.acquire({"full": 2})
    pool.release(held)
    with pytest.raises(LocalError, match="some are free"):
        pool.release(held)


@given(data=st.data(), size=st.integers(1, 5), first=st.integers(0, 3), num=st.integers(1, 9))
def test_copies_are_the_fewest_runs(data: st.DataObject, size: int, first: int, num: int) -> None:
    group = GroupSpec("full", (0,), size, 1, 8, "bfloat16")
    device = data.draw(st.permutations(range(100, 100 + num)))
    host = sorted(data.draw(st.sets(st.integers(0, 15), min_size=num, max_size=num)))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, (first + num) * size)] * 2)))
    table = BlockTable.of(device, first_block=first)
    copies = list(block_copies(group, table, np.array(host, dtype=np.uint32), start, stop))

    def slots() -> Iterator[tuple[int, int, int]]:
        for position in range(max(start, first * size), stop):
            at, slot = position // size - first, position % size
            yield device[at], host[at], slot

    copied = [
        (int(one.ids[at]), one.first_host_block + at, slot)
        for one in copies
        for at in range(len(one.ids))
        for slot in range(*one.slots)
    ]
    assert copied == list(slots())
    whole = [one for one in copies if one.slots == (0, size)]
    for one, other in pairwise(whole):
        assert one.first_host_block + len(one.ids) < other.first_host_block
