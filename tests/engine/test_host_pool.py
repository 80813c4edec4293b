"""Host blocks: how many there are, who gets them, and who waits."""

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.engine.bounce import HOST_LAYOUT, HostPool, host_blocks
from kvbus.engine.bounce.sizing import piece_tokens
from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import EngineSpec, GroupSpec, StatePart, lay_out_rank, state_group

pytestmark = pytest.mark.anyio

FULL = GroupSpec("full", (0, 1), 16, 6, 8, "bfloat16")
SMALL = GroupSpec("small", (2, 3), 4, 6, 8, "bfloat16", window=20)
GAPS_BYTES = 16 * 4096
"""More than lies behind the regions of a rank."""
STATE = state_group("state", (4,), (StatePart("conv", 4, 96), StatePart("ssm", 2, 200)))


@given(
    buffer_bytes=st.integers(0, 1 << 20),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    groups=st.sampled_from([(FULL,), (FULL, SMALL), (FULL, SMALL, STATE), (FULL, STATE)]),
)
def test_no_ranks_buffer_is_larger_than_asked_for_and_with_some_tokens_more_one_would_be(
    buffer_bytes, tp, pp, groups
):
    spec = EngineSpec("e", "m", tp, groups, pp)
    least = {group.name: 2 if group.state else -(-16 // group.block_size) for group in groups}
    try:
        blocks = host_blocks(spec, buffer_bytes=buffer_bytes, num_states=2)
    except GeometryError:
        assert buffer_bytes < max(_buffer_bytes(spec, least)) + spec.num_ranks * GAPS_BYTES
        return

    assert max(_buffer_bytes(spec, blocks)) <= buffer_bytes
    assert all(blocks[name] >= number for name, number in least.items())
    more = {g.name: blocks[g.name] + (0 if g.state else 16 // g.block_size + 1) for g in groups}
    assert sum(_buffer_bytes(spec, more)) + spec.num_ranks * GAPS_BYTES > buffer_bytes


def _buffer_bytes(spec: EngineSpec, blocks: dict[str, int]) -> list[int]:
    """Bytes of each rank's segment."""
    ranks = (lay_out_rank(spec, n, HOST_LAYOUT, num_blocks=blocks) for n in range(spec.num_ranks))
    return [rank.segments[0].size_bytes for rank in ranks]


def test_a_piece_is_whole_blocks_of_every_group_and_at_least_one():
    spec = EngineSpec("e", "m", 1, (FULL, SMALL))
    token_bytes = 2 * 2 * 6 * 8 * 2 * 2

    assert piece_tokens(spec, piece_bytes=1) == 16
    assert piece_tokens(spec, piece_bytes=40 * token_bytes) == 32
    assert piece_tokens(EngineSpec("e", "m", 1, (STATE,)), piece_bytes=1 << 20) == 0


async def test_a_request_gets_blocks_of_every_group_or_none():
    pool = HostPool({"full": 4, "small": 8})
    await pool.acquire({"full": 3, "small": 1})

    with pytest.raises(LocalError, match="the host buffer is full") as refused:
        await pool.acquire({"full": 2, "small": 2})

    assert refused.value.code is ErrorCode.BUSY
    assert pool.num_held == 4


async def test_a_request_of_nothing_does_not_wait_behind_others():
    pool = HostPool({"full": 1})
    held = await pool.acquire({"full": 1})

    async def wait() -> None:
        pool.release(await pool.acquire({"full": 1}, wait_s=60.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        nothing = await pool.acquire({"full": 0})
        pool.release(held)

    assert len(nothing["full"]) == 0


async def test_a_request_that_is_larger_than_the_buffer_does_not_wait():
    pool = HostPool({"full": 4})

    with pytest.raises(GeometryError, match="there are only 4: make the host buffer larger"):
        await pool.acquire({"full": 5}, wait_s=60.0)


async def test_who_waits_gets_blocks_in_the_order_of_asking_and_is_not_overtaken():
    pool, order = HostPool({"full": 4}), []
    held = await pool.acquire({"full": 3})

    async def take(name: str, number: int) -> None:
        tables = await pool.acquire({"full": number}, wait_s=60.0)
        order.append(name)
        pool.release(tables)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take, "large", 4)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(take, "small", 1)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(LocalError):
            await pool.acquire({"full": 1})
        pool.release(held)

    assert order == ["large", "small"]
    assert pool.num_held == 0


async def test_a_wait_that_ends_without_room_is_busy_and_the_next_one_gets_its_turn():
    pool = HostPool({"full": 4})
    held = await pool.acquire({"full": 3})

    with pytest.raises(LocalError) as refused:
        await pool.acquire({"full": 2}, wait_s=0.01)
    pool.release(held)

    assert refused.value.code is ErrorCode.BUSY
    assert pool.num_waiting == 0
    assert len((await pool.acquire({"full": 4}))["full"]) == 4


async def test_no_more_requests_wait_than_the_limit():
    pool = HostPool({"full": 1}, max_waiting=1)
    held = await pool.acquire({"full": 1})

    async def wait() -> None:
        pool.release(await pool.acquire({"full": 1}, wait_s=60.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(LocalError, match="1 requests wait"):
            await pool.acquire({"full": 1}, wait_s=60.0)
        pool.release(held)

    assert pool.num_held == 0
