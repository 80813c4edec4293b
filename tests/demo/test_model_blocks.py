"""The demo's paged cache: each position of a request has one slot on each holder of its heads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbus.demo.model_config import ModelConfig
from kvbus.demo.paged_cache import PagedKV, gather, held_by_query_head, write
from kvbus.errors import GeometryError, LocalError
from kvbus.geometry import BlockTable, KvPart, held_heads

K, V = KvPart.KEY, KvPart.VALUE

TINY = ModelConfig(num_layers=1, kv_heads=2, head_dim=2)


@given(num_kv_heads=st.integers(1, 12), sharing=st.integers(1, 6), factor=st.floats(0, 1))
def test_every_query_head_reads_its_kv_head_and_every_replica_is_read(
    num_kv_heads: int, sharing: int, factor: float
) -> None:
    num_query_heads = num_kv_heads * sharing
    tp = 1 + int(factor * (num_query_heads - 1))

    read = held_by_query_head(num_query_heads, num_kv_heads, tp)

    for query_head, (rank, number) in enumerate(read):
        assert held_heads(rank, tp, num_kv_heads)[number] == query_head // sharing
    copies = {
        (rank, i) for rank in range(tp) for i in range(len(held_heads(rank, tp, num_kv_heads)))
    }
    assert set(read) == copies


@pytest.mark.parametrize("tp", [0, 5])
def test_ranks_without_a_query_head_are_refused(tp: int) -> None:
    with pytest.raises(GeometryError, match="query head"):
        held_by_query_head(4, 2, tp)


@given(data=st.data(), block_size=st.integers(1, 5), num_tokens=st.integers(1, 20))
def test_what_was_written_in_pieces_is_gathered_whole_and_no_other_slot_changes(
    data: st.DataObject, block_size: int, num_tokens: int
) -> None:
    """The oracle walks position by position: block_ids[p // size], slot p % size.

    The table may lack the blocks before its first one.
    """
    needed = -(-num_tokens // block_size)
    views = PagedKV.private(TINY, num_blocks=needed + 2, block_size=block_size).views[0][0]
    block_ids = data.draw(st.permutations(range(needed + 2)))[:needed]
    first_block = data.draw(st.integers(0, needed - 1))
    table = BlockTable.of(block_ids[first_block:], first_block=first_block)
    first = data.draw(st.integers(first_block * block_size, num_tokens - 1))
    cut = data.draw(st.integers(first, num_tokens))
    k = torch.arange(1, num_tokens * 4 + 1, dtype=torch.bfloat16).view(num_tokens, 2, 2)

    for start, stop in ((cut, num_tokens), (first, cut)):
        write(views, table, start=start, parts={K: k[start:stop], V: -k[start:stop]})
    gathered = gather(views, table, start=first, stop=num_tokens)

    expected = torch.zeros_like(views[K])
    for position in range(first, num_tokens):
        block, slot = block_ids[position // block_size], position % block_size
        expected[block, slot] = k[position]
    assert torch.equal(gathered[K], k[first:])
    assert torch.equal(gathered[V], -k[first:])
    assert torch.equal(views[K], expected)
    assert torch.equal(views[V], -expected)


@pytest.mark.parametrize(
    ("block_ids", "first_block"), [([0], 0), ([0, 4], 0), ([0, 0], 0), ([], 0), ([0], 1)]
)
def test_a_table_that_does_not_hold_the_tokens_is_refused(
    block_ids: list[int], first_block: int
) -> None:
    views = PagedKV.private(TINY, num_blocks=4, block_size=4).views[0][0]

    with pytest.raises(LocalError, match="block"):
        gather(views, BlockTable.of(block_ids, first_block=first_block), start=3, stop=5)


def test_each_layer_is_on_the_ranks_of_one_stage() -> None:
    config = ModelConfig(num_layers=5)
    kv = PagedKV.private(config, num_blocks=1, block_size=4, tp=2, pp=3)

    assert [sorted(layers) for layers in kv.views] == [[0], [0], [1, 2], [1, 2], [3, 4], [3, 4]]
    assert [len(kv.ranks_of(layer)) for layer in range(5)] == [2] * 5
