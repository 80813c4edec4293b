"""A request that finds the cache full waits for its blocks, and is not overtaken."""

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.demo.blocks import ShuffledPool, Tables, decode_blocks
from kvbus.errors import LocalError
from kvbus.geometry import BlockTable, GroupSpec


async def take(pool: ShuffledPool, num_blocks: int) -> Tables:
    return await pool.take({"full": range(num_blocks)}, wait_s=60)


def ids(tables: Tables) -> list[int]:
    return tables["full"].array().tolist()


@pytest.mark.anyio
async def test_the_first_that_waits_is_the_first_that_gets_blocks() -> None:
    pool = ShuffledPool({"full": 4}, seed="a")
    held = await take(pool, 3)
    got: list[str] = []

    async def wait(name: str, num_blocks: int) -> None:
        await take(pool, num_blocks)
        got.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, "large", 3)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(wait, "small", 1)
        await anyio.wait_all_tasks_blocked()
        before = list(got)
        pool.give(held)

    assert before == []
    assert got == ["large", "small"]


@pytest.mark.anyio
async def test_all_free_waits_for_the_last_block() -> None:
    pool = ShuffledPool({"full": 3}, seed="a")
    first, second = await take(pool, 1), await take(pool, 2)
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
    pools = [ShuffledPool({"full": 64}, seed=seed) for seed in ("prefill", "decode")]

    orders = [ids(await take(pool, 64)) for pool in pools]

    assert sorted(orders[0]) == sorted(orders[1]) == list(range(64))
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


@pytest.mark.anyio
async def test_a_request_gets_a_table_of_each_group_that_starts_where_it_asked() -> None:
    pool = ShuffledPool({"full": 8, "window": 4}, seed="a")

    tables = await pool.take({"full": range(5), "window": range(3, 5)}, wait_s=0)
    held = pool.num_held
    pool.give(tables)

    shapes = {group: (table.first_block, len(table)) for group, table in tables.items()}
    assert shapes == {"full": (0, 5), "window": (3, 2)}
    assert (held, pool.num_held) == (7, 0)


@pytest.mark.anyio
async def test_requests_that_want_the_same_groups_in_another_order_do_not_wait_for_each_other() -> (
    None
):
    pool = ShuffledPool({"full": 2, "window": 2}, seed="a")
    served: list[int] = []

    async def serve(number: int) -> None:
        names = ("full", "window") if number % 2 else ("window", "full")
        tables = await pool.take({name: range(2) for name in names}, wait_s=60)
        await anyio.lowlevel.checkpoint()
        pool.give(tables)
        served.append(number)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(serve, number)

    assert sorted(served) == list(range(6))


@given(
    num_blocks=st.integers(1, 12),
    choices=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30),
)
def test_no_block_ever_has_two_owners_and_none_is_lost(
    num_blocks: int, choices: list[tuple[bool, int]]
) -> None:
    async def run() -> None:
        pool = ShuffledPool({"full": num_blocks}, seed="a")
        owned: list[Tables] = []
        for takes, amount in choices:
            if takes and amount <= num_blocks - pool.num_held:
                owned.append(await take(pool, amount))
            elif not takes and owned:
                pool.give(owned.pop(amount % len(owned)))
            held = [block for tables in owned for block in ids(tables)]

            assert len(set(held)) == len(held) == pool.num_held
            assert set(held) <= set(range(num_blocks))

    anyio.run(run)


@pytest.mark.anyio
async def test_a_request_that_the_whole_cache_does_not_hold_is_refused_and_takes_nothing() -> None:
    pool = ShuffledPool({"full": 8, "window": 4}, seed="a")

    with pytest.raises(LocalError, match="5 host blocks of group 'window', there are only 4"):
        await pool.take({"full": range(5), "window": range(5)}, wait_s=60)

    assert pool.num_held == 0


@pytest.mark.anyio
@pytest.mark.parametrize("returned", ["free", "twice", "one of two", "unknown"])
async def test_a_double_free_is_an_error_and_frees_nothing(returned: str) -> None:
    pool = ShuffledPool({"full": 3}, seed="a")
    first, second = await take(pool, 1), await take(pool, 1)
    pool.give(first)
    [free], [held] = ids(first), ids(second)
    table = {"free": [free], "twice": [held, held], "one of two": [held, free], "unknown": [99]}

    with pytest.raises(LocalError, match="some are free, or do not exist"):
        pool.give({"full": BlockTable.of(table[returned])})

    assert pool.num_held == 1


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

    blocks = decode_blocks(group, num_tokens, num_new)

    read = [p for p in range(num_tokens) if window is None or p >= num_tokens - window]
    filled = range(num_tokens, num_tokens + num_new)
    assert set(blocks) == {position // size for position in (*read, *filled)}
