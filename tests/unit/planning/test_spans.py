"""A fetch moves the positions that its tokens need, and its chunks move each of them once."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvbus.geometry import GroupSpec, StatePart, state_group
from kvbus.planning import SpanMap, tail_spans
from tests.unit.planning.handoffs import moved_positions, wanted_positions

FULL = GroupSpec("full", (0,), 16, 2, 8, "float16")
NUMBERS, SIZES = st.integers(0, 50), st.integers(1, 50)
STATE = state_group("state", (1,), (StatePart("ssm", 2, 8),))


def windowed(window: int, block_size: int = 16) -> GroupSpec:
    return GroupSpec("window", (2,), block_size, 2, 8, "float16", window=window)


@given(NUMBERS, NUMBERS, SIZES, SIZES, SIZES)
def test_fetch_moves_blocks(
    start: int, length: int, window: int, reads_in: int, holds_in: int
) -> None:
    readers = FULL, STATE, windowed(window, reads_in)
    holders, stop = (windowed(window, holds_in), STATE, FULL), start + length
    spans = SpanMap(readers, holders).whole(start, stop)
    for group in readers:
        holder = next(one for one in holders if one.name == group.name)
        assert list(range(*spans[group.name])) == moved_positions(group, holder, start, stop)


@given(st.data(), NUMBERS, NUMBERS, SIZES)
def test_pieces_hold_all_once(data: st.DataObject, start: int, length: int, window: int) -> None:
    groups, stop = (FULL, STATE, windowed(window)), start + length
    ends = [start, *sorted(data.draw(st.lists(st.integers(start, stop), max_size=5))), stop]
    chunks = [
        SpanMap(groups, groups).chunk((start, stop), chunk, last=number == len(ends) - 2)
        for number, chunk in enumerate(pairwise(ends))
    ]
    for group in groups:
        moved = [position for spans in chunks for position in range(*spans[group.name])]
        assert moved == moved_positions(group, group, start, stop)
        for spans, (first, end) in zip(chunks, pairwise(ends), strict=True):
            inside = range(first, end) if not group.state else range(1)
            assert set(range(*spans[group.name])) <= set(inside)


def test_state_comes_with_last_piece_even_without_tokens() -> None:
    whole, spans = (0, 20), SpanMap((FULL, STATE), (FULL, STATE))
    before = spans.chunk(whole, (0, 20), last=False)
    after = spans.chunk(whole, (20, 20), last=True)
    assert before == {"full": (0, 20), "state": (0, 0)}
    assert after == {"full": (20, 20), "state": (0, 1)}


@given(NUMBERS, NUMBERS, SIZES)
def test_tail_is_the_rest_of_each_last_block(start: int, length: int, window: int) -> None:
    groups, stop = (FULL, STATE, windowed(window)), start + length
    tails = tail_spans(groups, SpanMap(groups, groups).whole(start, stop))
    for group in groups:
        wanted = wanted_positions(group, start, stop)
        blocks = {position // group.block_size for position in wanted}
        behind = [
            position
            for position in range(max(wanted, default=0) + 1, stop + group.block_size)
            if position // group.block_size in blocks
        ]
        assert list(range(*tails.get(group.name, (0, 0)))) == behind
