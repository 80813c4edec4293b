"""The demo's blocks: each has one owner, and each position of a request one slot on each holder."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbus.demo.block_allocator import BlockAllocator
from kvbus.demo.model_config import ModelConfig
from kvbus.demo.paged_cache import (
    LayerViews,
    PagedKV,
    held_head_of_each_query_head,
)
from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import held_heads

TINY = ModelConfig(num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=2)


@given(
    num_blocks=st.integers(0, 12),
    choices=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30),
)
def test_no_block_ever_has_two_owners_and_none_is_lost(
    num_blocks: int, choices: list[tuple[bool, int]]
) -> None:
    allocator = BlockAllocator(num_blocks)
    owned: list[list[int]] = []

    for allocates, amount in choices:
        if allocates and amount <= allocator.num_free:
            owned.append(allocator.allocate(amount))
        elif not allocates and owned:
            allocator.free(owned.pop(amount % len(owned)))
        held = [block for blocks in owned for block in blocks]

        assert len(set(held)) == len(held) == num_blocks - allocator.num_free
        assert set(held) <= set(range(num_blocks))


@given(num_blocks=st.integers(0, 8), taken=st.integers(0, 8), excess=st.integers(1, 5))
def test_a_full_cache_says_busy_and_takes_nothing(num_blocks: int, taken: int, excess: int) -> None:
    allocator = BlockAllocator(num_blocks)
    allocator.allocate(min(taken, num_blocks))
    free_before = allocator.num_free

    with pytest.raises(LocalError, match="full") as caught:
        allocator.allocate(free_before + excess)

    assert caught.value.code is ErrorCode.BUSY
    assert caught.value.detail == {"num_blocks": free_before + excess, "num_free": free_before}
    assert len(allocator.allocate(free_before)) == free_before


@pytest.mark.parametrize(
    "returned", [[0], [1, 1], [1, 0], [1, 99], [-1]], ids=lambda ids: f"free{ids}"
)
def test_a_double_free_is_an_error_and_frees_nothing(returned: list[int]) -> None:
    allocator = BlockAllocator(3)
    zero, _one = allocator.allocate(2)
    allocator.free([zero])

    with pytest.raises(LocalError, match="double free"):
        allocator.free(returned)

    assert allocator.num_free == 2


def test_a_negative_number_of_blocks_is_refused() -> None:
    with pytest.raises(LocalError, match="-1 blocks"):
        BlockAllocator(3).allocate(-1)


@given(num_kv_heads=st.integers(1, 12), sharing=st.integers(1, 6), factor=st.floats(0, 1))
def test_every_query_head_reads_its_kv_head_and_every_replica_is_read(
    num_kv_heads: int, sharing: int, factor: float
) -> None:
    config = ModelConfig(num_query_heads=num_kv_heads * sharing, num_kv_heads=num_kv_heads)
    tp = 1 + int(factor * (config.num_query_heads - 1))

    read = held_head_of_each_query_head(config, tp)

    for query_head, held in enumerate(read):
        heads = held_heads(held.rank, tp, num_kv_heads)
        assert heads[held.local_head] == query_head // sharing
    copies = {
        (rank, i) for rank in range(tp) for i in range(len(held_heads(rank, tp, num_kv_heads)))
    }
    assert {(held.rank, held.local_head) for held in read} == copies


@pytest.mark.parametrize("tp", [0, 5])
def test_ranks_without_a_query_head_are_refused(tp: int) -> None:
    with pytest.raises(GeometryError, match="query head"):
        held_head_of_each_query_head(TINY, tp)


@given(data=st.data(), block_size=st.integers(1, 5), num_tokens=st.integers(1, 20))
def test_what_was_written_in_pieces_is_gathered_whole_and_no_other_slot_changes(
    data: st.DataObject, block_size: int, num_tokens: int
) -> None:
    """The oracle walks position by position: block_ids[p // size], slot p % size."""
    needed = -(-num_tokens // block_size)
    kv = PagedKV.private(TINY, num_blocks=needed + 2, block_size=block_size)
    block_ids = data.draw(st.permutations(range(needed + 2)))[:needed]
    cut = data.draw(st.integers(0, num_tokens))
    k = torch.arange(1, num_tokens * 4 + 1, dtype=torch.bfloat16).view(num_tokens, 2, 2)

    for start, stop in ((cut, num_tokens), (0, cut)):
        kv.write(0, 0, block_ids=block_ids, start=start, k=k[start:stop], v=-k[start:stop])
    gathered_k, gathered_v = kv.gather(0, 0, block_ids=block_ids, num_tokens=num_tokens)

    expected = torch.zeros_like(kv.views[0][0].k)
    for position in range(num_tokens):
        block, slot = block_ids[position // block_size], position % block_size
        expected[block, slot] = k[position]
    assert torch.equal(gathered_k, k)
    assert torch.equal(gathered_v, -k)
    assert torch.equal(kv.views[0][0].k, expected)
    assert torch.equal(kv.views[0][0].v, -expected)


@pytest.mark.parametrize("block_ids", [[0], [0, 4], [0, -1], []])
def test_a_table_that_does_not_hold_the_tokens_is_refused(block_ids: list[int]) -> None:
    kv = PagedKV.private(TINY, num_blocks=4, block_size=4)

    with pytest.raises(LocalError, match="block"):
        kv.gather(0, 0, block_ids=block_ids, num_tokens=5)


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 1), (1, 3, 2)])
def test_heads_that_are_not_the_ranks_are_refused_not_broadcast(shape: tuple[int, ...]) -> None:
    kv = PagedKV.private(TINY, num_blocks=1, block_size=4)

    with pytest.raises(GeometryError, match="do not fit"):
        kv.write(0, 0, block_ids=[0], start=0, k=torch.ones(shape), v=torch.ones(shape))


def test_views_of_different_shapes_are_refused() -> None:
    with pytest.raises(GeometryError, match="slot"):
        LayerViews(k=torch.zeros(4, 2, 2, 2), v=torch.zeros(4, 2, 2, 1))
