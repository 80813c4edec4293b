"""The copies of the mapped path move what plain loops would, however they are cut into jobs."""

from collections import Counter
from collections.abc import Iterable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.planning import Copies, Run, check_runs, check_sources, cut_copies
from tests.examples import num_examples
from tests.planning.handoffs import Case, cases
from tests.planning.test_direct import SOME, copied_by_loops, plan_of, spans_of


def copies_of(case: Case) -> list[Copies]:
    spans = spans_of(case, case.start, case.stop)
    return plan_of(case).copies(case.prefill.tables, case.decode.tables, spans)


def moved(case: Case, copies: Iterable[Copies]) -> tuple[bytes, bytes]:
    """The decode side's memory after the copies, and how often each of its bytes is written."""
    after = bytearray(case.decode.memory)
    times = bytearray(len(after))
    for one in copies:
        for out_of, to in one.addresses().T.tolist():
            at, source = to - case.decode.base, out_of - case.prefill.base
            assert 0 <= at <= at + one.run_bytes <= len(after)
            assert 0 <= source <= source + one.run_bytes <= len(case.prefill.memory)
            after[at : at + one.run_bytes] = case.prefill.memory[source : source + one.run_bytes]
            for byte in range(at, at + one.run_bytes):
                times[byte] += 1
    return bytes(after), bytes(times)


def lattices(most: int = 4) -> st.SearchStrategy[Copies]:
    """Lattices whose runs lie anywhere, apart or not."""
    offsets = st.lists(
        st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=most
    ).map(lambda rows: np.array(rows, dtype=np.int64).T)
    return st.builds(Copies, offsets, offsets, offsets, st.integers(1, 9))


def moves_of(copies: Iterable[Copies]) -> Counter[tuple[int, int]]:
    """Every byte that is copied: where from and where to."""
    return Counter(
        (source + byte, target + byte)
        for one in copies
        for source, target in one.addresses().T.tolist()
        for byte in range(one.run_bytes)
    )


@settings(SOME, max_examples=num_examples(300))
@given(cases(), st.integers(1, 40))
def test_jobs_move_exactly_the_bytes_that_loops_over_every_element_move(
    case: Case, job_bytes: int
) -> None:
    jobs = cut_copies(copies_of(case), job_bytes=job_bytes)

    assert moved(case, [one for job in jobs for one in job]) == copied_by_loops(case)


@SOME
@given(st.lists(lattices(), max_size=4), st.integers(1, 300))
def test_no_job_is_larger_than_asked_for_and_none_could_take_the_next_part(
    copies: list[Copies], job_bytes: int
) -> None:
    jobs = cut_copies(copies, job_bytes=job_bytes)

    sizes = [sum(one.num_bytes for one in job) for job in jobs]
    assert all(0 < size <= job_bytes for size in sizes)
    for size, job in zip(sizes, jobs[1:], strict=False):
        assert size + job[0].num_bytes > job_bytes
    assert moves_of(one for job in jobs for one in job) == moves_of(copies)


@SOME
@given(lattices())
def test_addresses_are_the_sums_of_one_offset_of_each_kind(one: Copies) -> None:
    sums = [
        [
            outer + unit + inner
            for outer in one.outer[side].tolist()
            for unit in one.units[side].tolist()
            for inner in one.inner[side].tolist()
        ]
        for side in (0, 1)
    ]

    assert one.addresses().tolist() == sums
    assert one.num_bytes == len(sums[0]) * one.run_bytes


@SOME
@given(lattices(), st.lists(st.integers(0, 700), max_size=6, unique=True), st.booleans())
def test_sources_are_refused_unless_the_runs_of_each_outer_offset_lie_in_one_extent(
    one: Copies, edges: list[int], whole: bool
) -> None:
    edges = [0, 700] if whole else sorted(edges)
    extents = list(zip(edges[::2], edges[1::2], strict=False))[::-1]
    inside = all(
        any(
            all(first <= outer + unit + inner <= end - one.run_bytes for unit, inner in within(one))
            for first, end in extents
        )
        for outer in one.outer[0].tolist()
    )

    if inside:
        check_sources([one], extents)
    else:
        with pytest.raises(GeometryError, match="outside of the memory that is mapped"):
            check_sources([one], extents)


@SOME
@given(lattices())
def test_an_extent_that_ends_or_starts_a_byte_too_early_or_late_is_refused(one: Copies) -> None:
    sources = one.addresses()[0]
    first, end = int(sources.min()), int(sources.max()) + one.run_bytes

    check_sources([one], [(first, end)])

    for short in ([(first + 1, end)], [(first, end - 1)], []):
        with pytest.raises(GeometryError):
            check_sources([one], short)


@SOME
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), max_size=3),
    st.lists(st.integers(0, 70), max_size=6, unique=True).map(sorted),
)
def test_few_runs_are_refused_unless_each_lies_in_one_extent(
    sources: list[tuple[int, int]], edges: list[int]
) -> None:
    extents = list(zip(edges[::2], edges[1::2], strict=False))[::-1]
    runs = [(0, source, num_bytes) for source, num_bytes in sources]
    inside = all(
        any(first <= source and source + num_bytes <= end for first, end in extents)
        for source, num_bytes in sources
    )

    if inside:
        check_runs(runs, extents)
    else:
        with pytest.raises(GeometryError, match="outside of the memory that is mapped"):
            check_runs(runs, extents)


@pytest.mark.parametrize("run", [(0, 9, 5), (0, 19, 2), (0, 20, 1), (0, 30, 5)])
def test_a_run_that_leaves_an_extent_by_a_byte_is_refused(run: Run) -> None:
    check_runs([(0, 10, 10), (0, 31, 9)], [(31, 40), (10, 20)])
    with pytest.raises(GeometryError):
        check_runs([run], [(31, 40), (10, 20)])


def within(one: Copies) -> list[tuple[int, int]]:
    return list(product(one.units[0].tolist(), one.inner[0].tolist()))


@SOME
@given(cases())
def test_the_copies_of_a_plan_stay_in_the_memory_of_the_prefill_ranks(case: Case) -> None:
    segments = [
        (placed.addresses[segment.segment_id], segment.size_bytes)
        for placed in case.prefill.ranks.values()
        for segment in placed.rank.segments
    ]

    check_sources(copies_of(case), [(first, first + size) for first, size in segments])
