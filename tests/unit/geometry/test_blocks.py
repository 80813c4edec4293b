"""Block tables hold what was put in, and refuse what would put two tokens into one slot."""

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.geometry import FEW_IDS, MAX_BLOCKS, BlockTable, num_blocks_for

ids = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@given(ids, st.integers(0, 100))
def test_a_table_holds_its_ids_as_little_endian_uint32(block_ids: list[int], first: int) -> None:
    table = BlockTable.of(block_ids, first_block=first)
    assert table.ids == b"".join(number.to_bytes(4, "little") for number in block_ids)
    assert table.array().tolist() == block_ids
    assert len(table) == len(block_ids)


@pytest.mark.parametrize("wrong", [[-1], [2**32], [[1, 2]], 3, ["x"], [[1], [2, 3]], [1.5], [None]])
def test_ids_that_are_no_row_of_uint32_are_refused(wrong: object) -> None:
    with pytest.raises(GeometryError):
        BlockTable.of(wrong)  # type: ignore[arg-type]  # what a careless engine may pass


@given(ids, ids, st.integers(3, 100), st.sampled_from([0, 0, -1, 2]))
def test_table_is_extended_at_its_end(one: list[int], two: list[int], first: int, gap: int) -> None:
    table, end = BlockTable.of(one, first_block=first), first + len(one)
    more = BlockTable.of(two, first_block=end + gap)
    if gap == 0:
        assert table.extended(more) == BlockTable.of(one + two, first_block=first)
        return
    with pytest.raises(GeometryError) as refused:
        table.extended(more)
    assert refused.value.detail == {"starts_at": end + gap, "ends_at": end}


def test_a_table_cannot_be_extended_past_what_a_message_may_hold() -> None:
    with pytest.raises(GeometryError):
        BlockTable(ids=bytes(4 * MAX_BLOCKS)).extended(BlockTable.of([1], first_block=MAX_BLOCKS))


READERS: dict[str, Callable[[BlockTable], object]] = {
    "array": lambda table: table.array(),
    "ids": lambda table: table.check_ids(10),
    "cover": lambda table: table.check_covers(0, len(table), 1),
    "extended": lambda table: table.extended(BlockTable.of([], first_block=len(table))),
    "extends": lambda table: BlockTable.of([]).extended(table),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_every_reader_refuses_bytes_with_partial_id(reader: Callable[[BlockTable], object]) -> None:
    for num_bytes in (1, 2, 3, 5, 7):
        with pytest.raises(GeometryError):
            reader(BlockTable(ids=bytes(num_bytes)))


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(1, 12), st.sampled_from([0, 1, 1000]))
def test_ids_are_in_range_and_distinct(block_ids: list[int], num_blocks: int, apart: int) -> None:
    """Few ids, or many that are near each other or far apart."""
    if apart:
        num_blocks = apart * (num_blocks + 2 * FEW_IDS)
        block_ids = [*range(2 * FEW_IDS), *(2 * FEW_IDS + number for number in block_ids)]
        block_ids = [apart * number for number in block_ids]
    table = BlockTable.of(block_ids)

    if (largest := max(block_ids, default=-1)) >= num_blocks:
        with pytest.raises(GeometryError) as refused:
            table.check_ids(num_blocks)
        assert refused.value.detail == {"block_id": largest, "num_blocks": num_blocks}
    elif len(set(block_ids)) < len(block_ids):
        with pytest.raises(GeometryError, match="twice"):
            table.check_ids(num_blocks)
    else:
        table.check_ids(num_blocks)


@given(
    start=st.integers(0, 20),
    length=st.integers(0, 20),
    block_size=st.integers(1, 5),
    first=st.integers(0, 20),
    count=st.integers(0, 20),
)
def test_table_covers_exact_blocks_of_tokens_and_holds_supersets(
    start: int, length: int, block_size: int, first: int, count: int
) -> None:
    stop = start + length
    holding = sorted({position // block_size for position in range(start, stop)})
    table = BlockTable.of(np.arange(count), first_block=first)
    named = list(range(first, first + count))
    with nullcontext() if named == holding else pytest.raises(GeometryError):
        table.check_covers(start, stop, block_size)
    with nullcontext() if set(holding) <= set(named) else pytest.raises(GeometryError):
        table.check_holds(start, stop, block_size, group="full")


@given(st.integers(0, 100), st.integers(1, 20))
def test_num_blocks_counts_blocks_tokens_fall_into(num_tokens: int, block_size: int) -> None:
    counted = len({position // block_size for position in range(num_tokens)})
    assert num_blocks_for(num_tokens, block_size) == counted
