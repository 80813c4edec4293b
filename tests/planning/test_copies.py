"""The copies of the mapped path move what plain loops would, however they are cut into jobs."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.geometry import BlockTable, EngineSpec, GroupSpec, KvLayout, lay_out_rank
from kvbus.planning import (
    Copies,
    DirectPlan,
    PlacedRank,
    ReadMap,
    Run,
    check_runs,
    check_sources,
    cut_copies,
)
from kvbus.planning import copies as copies_module
from kvbus.planning.copies import interleaved
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


@pytest.mark.parametrize("cached_bytes", [0, copies_module.CACHED_BYTES])
@settings(SOME, max_examples=num_examples(300))
@given(case=cases(), job_bytes=st.integers(1, 40))
def test_jobs_move_exactly_the_bytes_that_loops_over_every_element_move(
    cached_bytes: int, case: Case, job_bytes: int
) -> None:
    with patch.object(copies_module, "CACHED_BYTES", cached_bytes):
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


@st.composite
def neighbours(draw: st.DrawFn) -> Copies:
    """Outer offsets in groups that are alike, or nearly, or one offset short."""
    one = draw(lattices(3))
    size, run = draw(st.integers(2, 4)), one.run_bytes
    sides = [
        draw(st.sampled_from([0, run])) * np.arange(size),
        np.array(draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))),
    ]
    groups = (
        one.outer[:, :, None] * 1000
        + np.stack(sides if draw(st.booleans()) else sides[::-1])[:, None]
    )
    groups[0, 0, -1] += draw(st.sampled_from([0, 0, 0, 1]))
    outer = groups.reshape(2, -1)
    order = draw(st.permutations(range(outer.shape[1] - draw(st.integers(0, 1)))))
    return replace(one, outer=outer[:, order])


@SOME
@given(neighbours() | lattices())
def test_runs_in_turns_are_the_same_runs(one: Copies) -> None:
    found = interleaved(one)

    event(f"{one.outer.shape[1] // found.outer.shape[1]} in turns")
    assert moves_of([found]) == moves_of([one])


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_what_several_readers_take_of_a_token_is_read_in_one_go(readers: int) -> None:
    prefill, decode = engine_of(1, base=1 << 30), engine_of(readers, base=1 << 40)
    shares = ReadMap(*([one.rank for one in side.values()] for side in (prefill, decode))).shares()
    tables = ({"full": BlockTable.of([2, 0])}, {"full": BlockTable.of([1, 3])})

    forth = DirectPlan(prefill, decode, shares).copies(*tables, {"full": (0, 8)})
    back_shares = ReadMap(*([one.rank for one in s.values()] for s in (decode, prefill))).shares()
    back = DirectPlan(decode, prefill, back_shares).copies(*tables, {"full": (0, 8)})

    for copies, side in ((forth, 0), (back, 1)):
        one = interleaved(*copies)
        unit = replace(one, units=one.units[:, :1]).addresses()[side]
        assert (np.diff(unit) == one.run_bytes).all()
        assert unit.size * one.run_bytes == 2 * 4 * 4 * 8 * 2  # parts, tokens, heads, dims, bytes


def test_a_large_unit_is_read_in_order_and_a_small_one_written_so() -> None:
    inner = np.array([[0, 100, 10, 110], [0, 10, 20, 30]])
    zero, units = np.zeros((2, 1), np.int64), np.arange(4)[None] * np.array([[200], [40]])
    one = Copies(zero, units, inner, 10)

    with patch.object(copies_module, "CACHED_BYTES", one.num_bytes - 1):
        ((large,),) = cut_copies([one], job_bytes=1 << 20)
    ((small,),) = cut_copies([one], job_bytes=1 << 20)

    assert large.inner.tolist() == [[0, 10, 100, 110], [0, 20, 10, 30]]
    assert small is one


def engine_of(tp_size: int, *, base: int) -> dict[int, PlacedRank]:
    """Of one layer with four heads, NHD, in blocks of four tokens."""
    engine = EngineSpec("e", "m", tp_size, (GroupSpec("full", (0,), 4, 4, 8, "float16"),))
    ranks = (lay_out_rank(engine, n, KvLayout.parse("NHD"), num_blocks=4) for n in range(tp_size))
    return {
        rank.rank: PlacedRank(engine, rank, {rank.segments[0].segment_id: base * (rank.rank + 1)})
        for rank in ranks
    }


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
