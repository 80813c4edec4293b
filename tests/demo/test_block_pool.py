"""A request that finds the cache full waits for its blocks, and is not overtaken."""

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.demo.block_pool import BlockPool, BlockPools
from kvbus.demo.request_blocks import decode_blocks, most_decode_blocks
from kvbus.demo.shape import ModelShape, Side
from kvbus.demo.work import EngineSetup
from kvbus.geometry import GroupSpec


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


@pytest.mark.anyio
async def test_a_request_gets_a_table_of_each_group_that_starts_where_it_asked() -> None:
    pools = BlockPools({"full": 8, "window": 4}, seed="a")

    tables = await pools.take({"full": range(5), "window": range(3, 5)})
    held = pools.num_held
    pools.give(tables)
    await pools.all_free()

    shapes = {group: (table.first_block, len(table)) for group, table in tables.items()}
    assert shapes == {"full": (0, 5), "window": (3, 2)}
    assert (held, pools.num_held) == (7, 0)


@pytest.mark.anyio
async def test_requests_that_want_the_same_groups_in_another_order_do_not_wait_for_each_other() -> (
    None
):
    pools = BlockPools({"full": 2, "window": 2}, seed="a")
    served: list[int] = []

    async def serve(number: int) -> None:
        names = ("full", "window") if number % 2 else ("window", "full")
        tables = await pools.take({name: range(2) for name in names})
        await anyio.lowlevel.checkpoint()
        pools.give(tables)
        served.append(number)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(serve, number)

    assert sorted(served) == list(range(6))


@given(
    size=st.integers(1, 9),
    window=st.none() | st.integers(1, 30),
    num_tokens=st.integers(1, 60),
    num_new=st.integers(0, 20),
)
def test_the_decode_side_has_the_blocks_that_it_reads_or_fills_and_no_others(
    size: int, window: int | None, num_tokens: int, num_new: int
) -> None:
    group = GroupSpec("g", (0,), size, 1, 2, "bfloat16", window=window)
    setup = EngineSetup(
        engine_id="e",
        attach_path="/nowhere",
        model=ModelShape(),
        side=Side(),
        concurrency=1,
        max_prompt_tokens=60,
        max_new_tokens=num_new,
    )

    blocks = decode_blocks(group, num_tokens, num_new)

    read = [p for p in range(num_tokens) if window is None or p >= num_tokens - window]
    filled = range(num_tokens, num_tokens + num_new)
    assert set(blocks) == {position // size for position in (*read, *filled)}
    assert len(blocks) <= most_decode_blocks(group, setup)
