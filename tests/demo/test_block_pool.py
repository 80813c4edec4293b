"""A request that finds the cache full waits for its blocks, and is not overtaken."""

import anyio
import pytest

from kvbus.demo.block_pool import BlockPool


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_the_first_that_waits_is_the_first_that_gets_blocks() -> None:
    pool = BlockPool(4, seed="a")
    held = await pool.take(3)
    got: list[str] = []

    async def take(name: str, num_blocks: int) -> None:
        await pool.take(num_blocks)
        got.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take, "large", 3)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(take, "small", 1)
        await anyio.wait_all_tasks_blocked()
        before = list(got)
        pool.give(held)

    assert before == []
    assert got == ["large", "small"]


@pytest.mark.anyio
async def test_all_free_waits_for_the_last_block() -> None:
    pool = BlockPool(3, seed="a")
    first, second = await pool.take(1), await pool.take(2)
    pool.give(first)

    with anyio.move_on_after(0) as waiting:
        await pool.all_free()
    held = pool.num_held
    pool.give(second)
    await pool.all_free()

    assert waiting.cancelled_caught
    assert (held, pool.num_held) == (2, 0)


@pytest.mark.anyio
async def test_two_engines_give_out_their_blocks_in_different_orders() -> None:
    orders = [await BlockPool(64, seed=seed).take(64) for seed in ("prefill", "decode")]

    assert sorted(orders[0]) == sorted(orders[1]) == list(range(64))
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])
