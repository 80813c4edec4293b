"""The ring: how large it is, who gets blocks, and who waits."""

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.engine.bounce import RING_LAYOUT, HostRing, ring_blocks
from kvbus.engine.bounce.sizing import piece_tokens
from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import EngineSpec, GroupSpec, StatePart, lay_out_rank, state_group

pytestmark = pytest.mark.anyio

FULL = GroupSpec("full", (0, 1), 16, 6, 8, "bfloat16")
SMALL = GroupSpec("small", (2, 3), 4, 6, 8, "bfloat16", window=20)
GAPS_BYTES = 16 * 4096
"""More than lies behind the regions of a rank."""
STATE = state_group("state", (4,), (StatePart("conv", 4, 96), StatePart("ssm", 2, 200)))


@pytest.fixture
def anyio_backend() -> str:
    """The ring is used by sessions, which need the asyncio backend."""
    return "asyncio"


@given(
    ring_bytes=st.integers(0, 1 << 20),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    groups=st.sampled_from([(FULL,), (FULL, SMALL), (FULL, SMALL, STATE), (FULL, STATE)]),
)
def test_no_ranks_ring_is_larger_than_asked_for_and_with_some_tokens_more_one_would_be(
    ring_bytes, tp, pp, groups
):
    spec = EngineSpec("e", "m", tp, groups, pp)
    least = {group.name: 2 if group.state else -(-16 // group.block_size) for group in groups}
    try:
        blocks = ring_blocks(spec, ring_bytes=ring_bytes, num_states=2)
    except GeometryError:
        assert ring_bytes < max(_ring_bytes(spec, least)) + spec.num_ranks * GAPS_BYTES
        return

    assert max(_ring_bytes(spec, blocks)) <= ring_bytes
    assert all(blocks[name] >= number for name, number in least.items())
    more = {g.name: blocks[g.name] + (0 if g.state else 16 // g.block_size + 1) for g in groups}
    assert sum(_ring_bytes(spec, more)) + spec.num_ranks * GAPS_BYTES > ring_bytes


def _ring_bytes(spec: EngineSpec, blocks: dict[str, int]) -> list[int]:
    """Bytes of each rank's segment."""
    ranks = (lay_out_rank(spec, n, RING_LAYOUT, num_blocks=blocks) for n in range(spec.num_ranks))
    return [rank.segments[0].size_bytes for rank in ranks]


def test_a_piece_is_whole_blocks_of_every_group_and_at_least_one():
    spec = EngineSpec("e", "m", 1, (FULL, SMALL))
    token_bytes = 2 * 2 * 6 * 8 * 2 * 2

    assert piece_tokens(spec, piece_bytes=1) == 16
    assert piece_tokens(spec, piece_bytes=40 * token_bytes) == 32
    assert piece_tokens(EngineSpec("e", "m", 1, (STATE,)), piece_bytes=1 << 20) == 0


async def test_a_request_gets_blocks_of_every_group_or_none():
    ring = HostRing({"full": 4, "small": 8})
    await ring.take({"full": 3, "small": 1})

    with pytest.raises(LocalError, match="the ring is full") as refused:
        await ring.take({"full": 2, "small": 2})

    assert refused.value.code is ErrorCode.BUSY
    assert ring.num_held == 4


async def test_a_request_of_nothing_does_not_wait_behind_others():
    ring = HostRing({"full": 1})
    held = await ring.take({"full": 1})

    async def wait() -> None:
        ring.give(await ring.take({"full": 1}, wait_s=60.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        nothing = await ring.take({"full": 0})
        ring.give(held)

    assert len(nothing["full"]) == 0


async def test_a_request_that_is_larger_than_the_ring_does_not_wait():
    ring = HostRing({"full": 4})

    with pytest.raises(GeometryError, match="the whole ring has 4: make the ring larger"):
        await ring.take({"full": 5}, wait_s=60.0)


async def test_who_waits_gets_blocks_in_the_order_of_asking_and_is_not_overtaken():
    ring, order = HostRing({"full": 4}), []
    held = await ring.take({"full": 3})

    async def take(name: str, number: int) -> None:
        tables = await ring.take({"full": number}, wait_s=60.0)
        order.append(name)
        ring.give(tables)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take, "large", 4)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(take, "small", 1)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(LocalError):
            await ring.take({"full": 1})
        ring.give(held)

    assert order == ["large", "small"]
    assert ring.num_held == 0


async def test_a_wait_that_ends_without_room_is_busy_and_the_next_one_gets_its_turn():
    ring = HostRing({"full": 4})
    held = await ring.take({"full": 3})

    with pytest.raises(LocalError) as refused:
        await ring.take({"full": 2}, wait_s=0.01)
    ring.give(held)

    assert refused.value.code is ErrorCode.BUSY
    assert ring.num_waiting == 0
    assert len((await ring.take({"full": 4}))["full"]) == 4


async def test_no_more_requests_wait_than_the_limit():
    ring = HostRing({"full": 1}, max_waiting=1)
    held = await ring.take({"full": 1})

    async def wait() -> None:
        ring.give(await ring.take({"full": 1}, wait_s=60.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(LocalError, match="1 requests wait"):
            await ring.take({"full": 1}, wait_s=60.0)
        ring.give(held)

    assert ring.num_held == 0
