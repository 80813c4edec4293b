"""Block tables hold what was put in, and refuse what would put two tokens into one slot."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.geometry import FEW_IDS, MAX_BLOCKS, BlockTable, head_interval, num_blocks_for

ids = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@given(ids, st.integers(0, 100))
def test_a_table_holds_its_ids_as_little_endian_uint32(block_ids: list[int], first: int) -> None:
    table = BlockTable.of(block_ids, first_block=first)

    assert table.ids == b"".join(number.to_bytes(4, "little") for number in block_ids)
    assert table.array().tolist() == block_ids
    assert len(table) == len(block_ids)


@pytest.mark.parametrize(
    "wrong", [[-1], [2**32], [2**64], [[1, 2]], 3, ["x"], [[1], [2, 3]], [1.5], [None]]
)
def test_ids_that_are_no_row_of_uint32_are_refused(wrong: object) -> None:
    with pytest.raises(GeometryError):
        BlockTable.of(wrong)  # type: ignore[arg-type]  # what a careless engine may pass


@given(ids, ids, st.integers(0, 100))
def test_an_extended_table_is_one_followed_by_the_other(
    one: list[int], two: list[int], first: int
) -> None:
    table = BlockTable.of(one, first_block=first)

    extended = table.extended(BlockTable.of(two, first_block=first + len(one)))

    assert extended == BlockTable.of(one + two, first_block=first)


@given(st.integers(0, 10), st.integers(0, 10))
def test_an_extension_that_leaves_a_gap_or_goes_back_is_refused(end: int, start: int) -> None:
    table = BlockTable.of(range(end))
    more = BlockTable.of([99], first_block=start)

    if start == end:
        assert len(table.extended(more)) == end + 1
        return
    with pytest.raises(GeometryError) as refused:
        table.extended(more)
    assert (refused.value.detail["starts_at"], refused.value.detail["ends_at"]) == (start, end)


def test_a_table_cannot_be_extended_past_what_a_message_may_hold() -> None:
    full = BlockTable(ids=bytes(4 * MAX_BLOCKS))

    with pytest.raises(GeometryError):
        full.extended(BlockTable.of([1], first_block=MAX_BLOCKS))


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 5, 7])
def test_bytes_that_are_not_whole_ids_are_refused_by_every_reader(num_bytes: int) -> None:
    table = BlockTable(ids=bytes(num_bytes))

    with pytest.raises(GeometryError):
        table.array()
    with pytest.raises(GeometryError):
        table.check_ids(10)
    with pytest.raises(GeometryError):
        table.check_covers(0, num_bytes // 4, 1)
    with pytest.raises(GeometryError):
        table.extended(BlockTable.of([], first_block=num_bytes // 4))
    with pytest.raises(GeometryError):
        BlockTable.of([]).extended(table)


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(1, 12), st.booleans())
def test_ids_pass_exactly_when_all_are_in_range_and_none_is_named_twice(
    block_ids: list[int], num_blocks: int, many: bool
) -> None:
    if many:
        num_blocks += 2 * FEW_IDS
        block_ids = [*range(2 * FEW_IDS), *(2 * FEW_IDS + number for number in block_ids)]
    table = BlockTable.of(block_ids)
    fine = all(number < num_blocks for number in block_ids) and len(set(block_ids)) == len(
        block_ids
    )

    if fine:
        table.check_ids(num_blocks)
        return
    with pytest.raises(GeometryError):
        table.check_ids(num_blocks)


@pytest.mark.parametrize("others", [range(5), range(2 * FEW_IDS)], ids=["few", "many"])
def test_a_block_that_is_named_twice_is_refused(others: range) -> None:
    with pytest.raises(GeometryError, match="twice"):
        BlockTable.of([*others, 3]).check_ids(4 * FEW_IDS)


@pytest.mark.parametrize("num_ids", [0, 1, FEW_IDS, FEW_IDS + 1])
def test_the_largest_id_is_found_among_few_and_many(num_ids: int) -> None:
    block_ids = [7, *range(num_ids, 1, -1)] if num_ids else []

    assert BlockTable.of(block_ids).largest() == max(block_ids, default=0)


def test_a_block_is_found_by_its_number_in_the_request_or_is_not_here() -> None:
    table = BlockTable.of([70_000, 5], first_block=3)

    assert [table.block(3), table.block(4)] == [70_000, 5]
    for absent in (0, 2, 5):
        with pytest.raises(IndexError, match=f"no block {absent}"):
            table.block(absent)


def test_an_id_out_of_range_is_named_with_the_range() -> None:
    with pytest.raises(GeometryError) as refused:
        BlockTable.of([1, 9, 3]).check_ids(8)

    assert refused.value.detail == {"block_id": 9, "num_blocks": 8}


@given(
    start=st.integers(0, 20),
    length=st.integers(0, 20),
    block_size=st.integers(1, 5),
    first=st.integers(0, 20),
    count=st.integers(0, 20),
)
def test_a_table_covers_tokens_exactly_when_it_has_the_blocks_that_hold_them(
    start: int, length: int, block_size: int, first: int, count: int
) -> None:
    stop = start + length
    holding = sorted({position // block_size for position in range(start, stop)})
    table = BlockTable.of(np.arange(count), first_block=first)
    named = list(range(first, first + count))

    if named == holding:
        table.check_covers(start, stop, block_size)
        return
    with pytest.raises(GeometryError):
        table.check_covers(start, stop, block_size)


@given(st.integers(0, 100), st.integers(1, 20))
def test_the_number_of_blocks_is_that_of_the_blocks_that_tokens_fall_into(
    num_tokens: int, block_size: int
) -> None:
    counted = len({position // block_size for position in range(num_tokens)})

    assert num_blocks_for(num_tokens, block_size) == counted


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_head_intervals_of_all_ranks_are_all_heads_in_order(tp_size: int, heads: int) -> None:
    intervals = [range(*head_interval(rank, tp_size, heads)) for rank in range(tp_size)]

    assert [head for interval in intervals for head in interval] == list(range(heads))
    assert max(map(len, intervals)) - min(map(len, intervals)) <= 1
