"""Host blocks: how many there are, who gets them, and who waits."""

from random import Random

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.engine.bounce import (
    HOST_LAYOUT,
    BlockAllocator,
    HostPool,
    host_blocks,
    piece_tokens,
)
from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import EngineSpec, GroupSpec, StatePart, lay_out_rank, state_group

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
    buffer_bytes: int, tp: int, pp: int, groups: tuple[GroupSpec, ...]
) -> None:
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


def test_a_piece_is_whole_blocks_of_every_group_and_at_least_one() -> None:
    spec = EngineSpec("e", "m", 1, (FULL, SMALL))
    token_bytes = 2 * 2 * 6 * 8 * 2 * 2

    assert piece_tokens(spec, piece_bytes=1) == 16
    assert piece_tokens(spec, piece_bytes=40 * token_bytes) == 32
    assert piece_tokens(EngineSpec("e", "m", 1, (STATE,)), piece_bytes=1 << 20) == 0


async def hold(pool: HostPool, number: int, told: list[int]) -> None:
    """Wait for blocks, note it, and give them back."""
    tables = await pool.acquire({"full": number}, wait_s=60.0)
    told.append(number)
    pool.release(tables)


@pytest.mark.anyio
async def test_a_request_gets_blocks_of_every_group_or_none() -> None:
    pool = HostPool({"full": 4, "small": 8})
    held = await pool.acquire({"full": 3, "small": 1})

    for wait_s in (0.0, 0.01):
        with pytest.raises(LocalError, match="the host buffer is full") as refused:
            await pool.acquire({"full": 2, "small": 2}, wait_s=wait_s)
        assert refused.value.code is ErrorCode.BUSY
        assert (pool.num_held, pool.num_waiting) == (4, 0)
    with pytest.raises(GeometryError, match="there are only 4: make the host buffer larger"):
        await pool.acquire({"full": 5}, wait_s=60.0)

    pool.release(held)
    assert len((await pool.acquire({"full": 4}))["full"]) == 4


@pytest.mark.anyio
async def test_who_waits_gets_blocks_in_the_order_of_asking_and_a_request_of_nothing_at_once() -> (
    None
):
    pool, order = HostPool({"full": 4}, max_waiting=2), list[int]()
    held = await pool.acquire({"full": 3})

    async with anyio.create_task_group() as tasks:
        for number in (4, 1):
            tasks.start_soon(hold, pool, number, order)
            await anyio.wait_all_tasks_blocked()
        with pytest.raises(LocalError, match="2 requests wait"):
            await pool.acquire({"full": 1}, wait_s=60.0)
        nothing = await pool.acquire({"full": 0})
        pool.release(held)

    assert order == [4, 1]
    assert pool.num_held == len(nothing["full"]) == 0


@given(num_blocks=st.integers(0, 40), seed=st.integers(), wanted=st.lists(st.integers(0, 12)))
def test_every_block_is_free_or_with_one_owner(
    num_blocks: int, seed: int, wanted: list[int]
) -> None:
    random, allocator = Random(seed), BlockAllocator(num_blocks)
    free, owners = set(range(num_blocks)), list[list[int]]()
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


@pytest.mark.parametrize(
    ("given_back", "wanted", "taken"),
    [
        ([[1, 2, 3], list(range(10, 20))], 3, [1, 2, 3]),
        ([[0], [2, 3], [5, 6, 7]], 5, [5, 6, 7, 2, 3]),
        ([[block] for block in (6, 0, 3, 7, 1, 5, 2, 4)], 8, list(range(8))),
    ],
    ids=["the shortest run that is long enough", "else the longest first", "runs grow together"],
)
def test_what_is_acquired_lies_together(
    given_back: list[list[int]], wanted: int, taken: list[int]
) -> None:
    allocator = BlockAllocator(20)
    allocator.acquire(20)
    for ids in given_back:
        allocator.release(ids)

    assert allocator.acquire(wanted).tolist() == taken


@pytest.mark.parametrize("ids", [[2], [5, 5], [8], [-1], [4, 2]], ids=str)
def test_blocks_that_are_free_or_none_are_not_taken_back(ids: list[int]) -> None:
    allocator = BlockAllocator(8)
    allocator.acquire(8)
    allocator.release([2])

    with pytest.raises(LocalError):
        allocator.release(ids)

    assert allocator.num_free == 1
