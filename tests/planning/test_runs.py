"""Reads and copies of a plan move exactly the bytes that plain loops move, however they are cut."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.geometry import (
    BlockTable,
    EngineSpec,
    GroupSpec,
    KvLayout,
    validate_engine,
    validate_rank,
    validate_ranks,
)
from kvbus.planning import (
    Copies,
    Descriptors,
    DirectPlan,
    ReadMap,
    check_runs,
    check_sources,
    chunk_spans,
    copies,
    cut_copies,
    direct,
    from_slot,
    whole_slot,
)
from tests.planning.handoffs import (
    Case,
    cases,
    copied,
    copied_by_loops,
    placed_ranks,
    reads_in,
    runs_in,
    some,
)

FULL = GroupSpec("full", (0,), 4, 4, 8, "float16")


def by_arrays(case: Case) -> Descriptors:
    with patch.object(direct, "MAX_RUNS", -1):
        return case.plan().descriptors(*case.tables, case.spans())


def in_chunks(case: Case, plan: DirectPlan, cuts: Sequence[int]) -> Iterator[Descriptors]:
    """The reads of a fetch that follows an offer which grows."""
    readers, holders = case.decode.engine.groups, case.prefill.engine.groups
    ends = [case.start, *cuts, case.stop]
    for number, chunk in enumerate(pairwise(ends), start=2):
        whole, last = (case.start, case.stop), number == len(ends)
        spans = chunk_spans(readers, holders, whole, chunk, last=last)
        tables = {
            group.name: grown_to(case.prefill.tables[group.name], spans[group.name][1], group)
            for group in holders
            if spans[group.name][0] < spans[group.name][1]
        }
        yield plan.descriptors(tables, case.decode.tables, spans)


def grown_to(table: BlockTable, stop: int, group: GroupSpec) -> BlockTable:
    """The table when the offer had just got its first ``stop`` positions."""
    num_blocks = -(-stop // group.block_size) - table.first_block
    return BlockTable.of(table.array()[:num_blocks], first_block=table.first_block)


@some(2000, share=12)
@given(cases(), st.data())
def test_reads_move_exactly_the_bytes_that_loops_over_every_element_move(
    case: Case, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(case.start, case.stop), max_size=4).map(sorted))
    plan, expected = case.plan(), copied_by_loops(case)

    chunks = list(in_chunks(case, plan, cuts))
    whole, arrays = plan.descriptors(*case.tables, case.spans()), by_arrays(case)

    event("few" if case.plan().few_runs(*case.tables, case.spans()) is not None else "many")
    assert copied(case, reads_in(whole)) == expected
    assert copied(case, (run for reads in chunks for run in reads_in(reads))) == expected
    assert whole.num_bytes == sum(expected[1])
    assert whole.local.tolist() == arrays.local.tolist()
    assert whole.remote.tolist() == arrays.remote.tolist()
    assert_in_order_and_merged(whole)


def assert_in_order_and_merged(reads: Descriptors) -> None:
    local, remote = reads.local.astype(np.int64), reads.remote.astype(np.int64)
    ends = local[:-1, 0] + local[:-1, 1]
    adjoin = (ends == local[1:, 0]) & (remote[:-1, 0] + remote[:-1, 1] == remote[1:, 0])
    assert (ends <= local[1:, 0]).all()
    assert not adjoin.any()
    assert (local[:, 1] == remote[:, 1]).all()
    assert (local[:, 1] > 0).all()
    assert not local[:, 2].any()
    assert not remote[:, 2].any()


@some(600, share=6)
@given(cases(), st.integers(1, 40), st.sampled_from([0, copies.CACHED_BYTES]))
def test_copies_move_exactly_the_bytes_that_loops_over_every_element_move(
    case: Case, job_bytes: int, cached_bytes: int
) -> None:
    segments = [
        (at := placed.addresses[segment.segment_id], at + segment.size_bytes)
        for placed in case.prefill.ranks.values()
        for segment in placed.rank.segments
    ]

    all_of_it = case.copies()
    with patch.object(copies, "CACHED_BYTES", cached_bytes):
        jobs = cut_copies(all_of_it, job_bytes=job_bytes)

    check_sources(all_of_it, segments)
    assert copied(case, runs_in(one for job in jobs for one in job)) == copied_by_loops(case)


@some(100)
@given(cases())
def test_the_generated_engines_are_possible(case: Case) -> None:
    for side, ranks in zip((case.prefill, case.decode), case.ranks, strict=True):
        validate_engine(side.engine)
        for rank in ranks:
            validate_rank(side.engine, rank)
        validate_ranks(side.engine, ranks)


@st.composite
def lattices(draw: st.DrawFn) -> Copies:
    """Runs that lie anywhere, apart or not; some follow others, or lie in groups."""
    pairs = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=4)
    outer, units, inner = (np.array(draw(pairs), np.int64).T for _ in range(3))
    run_bytes, size = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    beside = [draw(st.sampled_from([0, run_bytes])) * np.arange(size), np.arange(size) * 7]
    groups = outer[:, :, None] + np.stack(draw(st.permutations(beside)))[:, None]
    groups[0, 0, -1] += draw(st.sampled_from([0, 0, 0, 1]))
    outer = groups.reshape(2, -1)[:, draw(st.permutations(range(groups[0].size)))]
    return Copies(outer, units, inner, run_bytes)


def moves_of(several: Sequence[Copies]) -> Counter[tuple[int, int]]:
    """Every byte that is copied: where from and where to."""
    return Counter(
        (source + byte, target + byte)
        for target, source, run_bytes in runs_in(several)
        for byte in range(run_bytes)
    )


@some(400)
@given(st.lists(lattices(), max_size=3), st.integers(1, 60), st.sampled_from([0, 1 << 20]))
def test_no_job_is_larger_than_asked_for_and_none_could_take_the_next_part(
    several: list[Copies], job_bytes: int, cached_bytes: int
) -> None:
    with patch.object(copies, "CACHED_BYTES", cached_bytes):
        jobs = cut_copies(several, job_bytes=job_bytes)

    sizes = [sum(one.num_bytes for one in job) for job in jobs]
    assert all(0 < size <= job_bytes for size in sizes)
    for size, job in zip(sizes, jobs[1:], strict=False):
        assert size + job[0].num_bytes > job_bytes
    assert moves_of([one for job in jobs for one in job]) == moves_of(several)


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_what_several_ranks_have_of_a_token_is_read_and_written_in_one_go(readers: int) -> None:
    one = placed_ranks(EngineSpec("e", "m", 1, (FULL,)), base=1 << 30)
    several = placed_ranks(EngineSpec("e", "m", readers, (FULL,)), base=1 << 40)

    for prefill, decode, side in ((one, several, 0), (several, one, 1)):
        ranks = ([placed.rank for placed in ranks.values()] for ranks in (prefill, decode))
        plan = DirectPlan(prefill, decode, ReadMap(*ranks).shares())
        table = {"full": BlockTable.of([2])}
        with patch.object(copies, "CACHED_BYTES", 0):
            ((job,),) = cut_copies(plan.copies(table, table, {"full": (0, 4)}), job_bytes=1 << 20)

        assert (np.diff(job.addresses()[side]) == job.run_bytes).all()
        assert job.num_bytes == 2 * 4 * 4 * 8 * 2  # parts, tokens, heads, dims, bytes


def test_what_no_cache_holds_is_read_in_order_and_what_one_holds_is_written_so() -> None:
    inner = np.array([[0, 100, 10, 110], [0, 10, 20, 30]])
    one = Copies(np.zeros((2, 1), np.int64), np.array([[0, 200], [0, 40]]), inner, 10)

    with patch.object(copies, "CACHED_BYTES", one.num_bytes - 1):
        ((large,),) = cut_copies([one], job_bytes=1 << 20)
    ((small,),) = cut_copies([one], job_bytes=1 << 20)

    assert large.addresses()[0].tolist() == [0, 10, 100, 110, 200, 210, 300, 310]
    assert small.addresses()[1].tolist() == [0, 10, 20, 30, 40, 50, 60, 70]


@some(400)
@given(lattices(), st.lists(st.integers(0, 900), max_size=6, unique=True).map(sorted), st.data())
def test_a_source_is_refused_unless_it_lies_in_one_extent(
    one: Copies, edges: list[int], data: st.DataObject
) -> None:
    sources = one.addresses()[0].tolist()
    first, end = min(sources), max(sources) + one.run_bytes
    near = st.sampled_from([(first, end), (first + 1, end), (first, end - 1), (first - 1, end)])
    apart = list(zip(edges[::2], edges[1::2], strict=False))[::-1]
    extents = [data.draw(near)] if data.draw(st.booleans()) else apart
    inner = list(product(one.units[0].tolist(), one.inner[0].tolist()))
    lattices_fit = all(
        any(
            all(low <= at + unit + step <= high - one.run_bytes for unit, step in inner)
            for low, high in extents
        )
        for at in one.outer[0].tolist()
    )
    each_fits = all(
        any(low <= at and at + one.run_bytes <= high for low, high in extents) for at in sources
    )

    assert accepted(lambda: check_sources([one], extents)) == lattices_fit
    assert accepted(lambda: check_runs(runs_in([one]), extents)) == each_fits


def accepted(check: Callable[[], None]) -> bool:
    try:
        check()
    except GeometryError:
        return False
    return True


BLOCK_BYTES = 2 * 4 * 2 * 4 * 2


def plan_between(prefill_block: int, decode_block: int) -> DirectPlan:
    prefill, decode = (
        placed_ranks(
            EngineSpec("e", "m", 1, (GroupSpec("full", (0,), size, 2, 4, "float16"),)),
            KvLayout.parse("NHD", cross_layer=True),
            num_blocks=8,
            base=base,
        )
        for base, size in ((1 << 20, prefill_block), (1 << 30, decode_block))
    )
    shares = ReadMap([prefill[0].rank], [decode[0].rank]).shares()
    return DirectPlan(prefill, decode, shares)


def test_whole_blocks_of_equal_engines_are_one_read_each_and_neighbours_are_one_together() -> None:
    tables = {"full": BlockTable.of([2, 3, 6])}, {"full": BlockTable.of([4, 5, 1])}

    found = plan_between(4, 4).descriptors(*tables, {"full": (0, 12)})

    assert list(reads_in(found)) == [
        ((1 << 30) + BLOCK_BYTES, (1 << 20) + 6 * BLOCK_BYTES, BLOCK_BYTES),
        ((1 << 30) + 4 * BLOCK_BYTES, (1 << 20) + 2 * BLOCK_BYTES, 2 * BLOCK_BYTES),
    ]


def test_the_estimate_of_reads_is_exact_for_whole_blocks_that_do_not_adjoin() -> None:
    plan = plan_between(4, 2)
    tables = {"full": BlockTable.of([4, 1])}, {"full": BlockTable.of([1, 7, 3, 5])}

    found = plan.descriptors(*tables, {"full": (0, 8)})

    assert plan.num_descriptors({"full": (0, 8)}) == len(found.local) == 8


@pytest.mark.parametrize("ids", [[1], [2], []], ids=["too_short", "starts_too_late", "empty"])
def test_a_table_that_does_not_cover_the_tokens_is_refused_on_either_side(ids: list[int]) -> None:
    plan, whole = plan_between(4, 4), {"full": BlockTable.of([0, 1])}
    lacking = {"full": BlockTable.of(ids, first_block=int(ids == [2]))}

    for tables in ((lacking, whole), (whole, lacking)):
        with pytest.raises(IndexError):
            plan.descriptors(*tables, {"full": (0, 8)})


def test_a_group_without_positions_needs_no_tables() -> None:
    found = plan_between(4, 4).descriptors({}, {}, {"full": (5, 5)})

    assert found.num_bytes == 0
    assert found.local.shape == found.remote.shape == (0, 3)
    assert found.local.dtype == found.remote.dtype == np.uint64


def test_reads_of_slots_name_the_device_of_either_side() -> None:
    local, remote = (np.array(rows, np.uint64) for rows in ([[64, 16, 0]], [[16, 16, 0]]))

    whole = whole_slot((0x4200, 1), (0x7000, 3), 96)
    part = from_slot(Descriptors(local=local.copy(), remote=remote), 0x7000, 3)

    assert (whole.local.tolist(), whole.remote.tolist()) == ([[0x4200, 96, 1]], [[0x7000, 96, 3]])
    assert (part.local.tolist(), part.remote.tolist()) == ([[64, 16, 0]], [[0x7010, 16, 3]])
