"""Slices against an oracle in plain Python."""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvbus.data.slicing import Slices

Span = tuple[int, int, int]
lengths = st.lists(st.integers(1, 40), max_size=30)


def plain_slices(rows: list[Span], slice_bytes: int, slice_rows: int) -> list[list[Span]]:
    pieces = [
        (to + start, at + start, min(slice_bytes, size - start))
        for to, at, size in rows
        for start in range(0, size, slice_bytes)
    ]
    slices: list[list[Span]] = []
    for piece in pieces:
        room = slices and len(slices[-1]) < slice_rows
        if not room or sum(p[2] for p in slices[-1]) + piece[2] > slice_bytes:
            slices.append([])
        slices[-1].append(piece)
    return slices


@given(lengths, st.integers(1, 50), st.integers(1, 7))
def test_slices_are_as_cut_by_hand(sizes: list[int], slice_bytes: int, slice_rows: int) -> None:
    rows = [(1000 + 50 * n, 9000 - 50 * n, size) for n, size in enumerate(sizes)]
    local = np.array([(to, size, 3) for to, _, size in rows], np.uint64).reshape(-1, 3)
    remote = np.array([(at, size, 5) for _, at, size in rows], np.uint64).reshape(-1, 3)
    slices, taken = Slices(slice_bytes=slice_bytes, slice_rows=slice_rows), []
    slices.add(local, remote)
    while not slices.exhausted:
        assert slices.is_ready
        here, there, num_bytes = slices.take()
        assert num_bytes == here[:, 1].sum() == there[:, 1].sum()
        assert set(here[:, 2]) == {3}
        assert set(there[:, 2]) == {5}
        both = np.stack([here[:, 0], there[:, 0], here[:, 1]], axis=1)
        taken.append([*map(tuple, both.tolist())])

    assert taken == plain_slices(rows, slice_bytes, slice_rows)


def test_a_slice_is_taken_without_a_copy_of_all_rows() -> None:
    rows = np.full((100_000, 3), 256, np.uint64)
    slices = Slices(slice_bytes=8192, slice_rows=2048)
    slices.add(rows, rows)
    tracemalloc.start()
    try:
        slices.take()
        assert tracemalloc.get_traced_memory()[1] < len(rows)
    finally:
        tracemalloc.stop()


def test_slices_are_exhausted_when_all_parts_have_come() -> None:
    rows, none = np.array([[8, 4, 0]], np.uint64), np.zeros((0, 3), np.uint64)
    slices = Slices(slice_bytes=8, slice_rows=8, num_parts=3)
    states = []
    for part in (rows, none, rows):
        slices.add(part, part)
        while slices.is_ready:
            slices.take()
        states.append(slices.exhausted)
    assert states == [False, False, True]
