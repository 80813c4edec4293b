"""Reads and copies of a plan move exactly the bytes that plain loops move, however they are cut."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, event, given
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
from kvbus.planning import ReadMap, Reads, RunPlan, Runs
from tests.unit.planning.handoffs import (
    Case,
    cases,
    copied,
    copied_by_loops,
    placed_ranks,
    reads_in,
    some,
)


@some(2000, share=12)
@given(cases(), st.integers(1, 40), st.data())
def test_plan_moves_same_bytes_as_loops(case: Case, job_bytes: int, data: st.DataObject) -> None:
    assert_an_agent_would_accept(case)
    cuts = data.draw(st.lists(st.integers(case.start, case.stop), max_size=4).map(sorted))
    plan, expected = case.plan(), copied_by_loops(case)

    runs = plan.runs(*case.tables, case.spans())
    reads = runs.reads()
    chunks = list(in_chunks(case, plan, cuts))
    jobs = runs.cut(job_bytes)

    event("few" if runs.few else "many")
    assert copied(case, runs) == expected
    assert copied(case, reads_in(reads)) == expected
    assert copied(case, (run for chunk in chunks for run in reads_in(chunk))) == expected
    assert copied(case, (run for job in jobs for run in job)) == expected
    assert runs.num_bytes == reads.num_bytes == sum(expected[1])
    assert_in_order_and_merged(reads)
    assert all(0 < job.num_bytes <= job_bytes for job in jobs)


def assert_an_agent_would_accept(case: Case) -> None:
    for side, ranks in zip((case.prefill, case.decode), case.ranks, strict=True):
        validate_engine(side.engine)
        for rank in ranks:
            validate_rank(side.engine, rank)
        validate_ranks(side.engine, ranks)


def in_chunks(case: Case, plan: RunPlan, cuts: Sequence[int]) -> Iterator[Reads]:
    """The reads of a fetch that follows an offer which grows."""
    ends = [case.start, *cuts, case.stop]
    for number, chunk in enumerate(pairwise(ends), start=2):
        whole, last = (case.start, case.stop), number == len(ends)
        spans = case.span_map().chunk(whole, chunk, last=last)
        tables = {
            group.name: grown_to(case.prefill.tables[group.name], spans[group.name][1], group)
            for group in case.prefill.engine.groups
            if spans[group.name][0] < spans[group.name][1]
        }
        yield plan.runs(tables, case.decode.tables, spans).reads()


def grown_to(table: BlockTable, stop: int, group: GroupSpec) -> BlockTable:
    """The table when the offer had only its first ``stop`` positions."""
    num_blocks = -(-stop // group.block_size) - table.first_block
    return BlockTable.of(table.array()[:num_blocks], first_block=table.first_block)


def assert_in_order_and_merged(reads: Reads) -> None:
    local, remote = reads.local.astype(np.int64), reads.remote.astype(np.int64)
    ends, theirs = (side[:-1, 0] + side[:-1, 1] for side in (local, remote))
    assert (ends <= local[1:, 0]).all()
    assert not ((ends == local[1:, 0]) & (theirs == remote[1:, 0])).any()
    assert (local[:, 1:] == remote[:, 1:]).all()
    assert (local[:, 1] > 0).all()
    assert not local[:, 2].any()


@some(400, share=16)
@given(cases(), st.data())
def test_copy_is_refused_if_one_source_byte_is_not_mapped(case: Case, data: st.DataObject) -> None:
    runs = case.runs()
    assume(runs.num_bytes)
    _, source, num_bytes = data.draw(st.sampled_from(list(runs)))
    mapped = [
        (at := placed.addresses[segment.segment_id], at + segment.size_bytes)
        for placed in case.prefill.ranks.values()
        for segment in placed.rank.segments
    ]
    first, end = within = next(one for one in mapped if one[0] <= source < one[1])
    left = data.draw(st.sampled_from([(first, source + num_bytes - 1), (source + 1, end), None]))
    hurt = [one for one in mapped if one != within] + ([left] if left else [])

    runs.check_sources(mapped)
    with pytest.raises(GeometryError, match="outside"):
        runs.check_sources(hurt)


@pytest.fixture
def plan() -> RunPlan:
    """A plan between two equal engines, whose blocks have 128 bytes."""
    engine = EngineSpec("e", "m", 1, (GroupSpec("full", (0,), 4, 2, 4, "float16"),))
    layout = KvLayout.parse("NHD", cross_layer=True)
    prefill, decode = (placed_ranks(engine, layout, base=base) for base in (1 << 20, 1 << 30))
    return RunPlan(prefill, decode, ReadMap([prefill[0].rank], [decode[0].rank]).shares())


def test_group_needs_all_blocks_on_both_sides_only_for_positions(plan: RunPlan) -> None:
    whole = {"full": BlockTable.of([0, 1])}
    nothing = plan.runs({}, {}, {"full": (5, 5)}).reads()
    assert nothing.local.shape == nothing.remote.shape == (0, 3)
    for lacking in (BlockTable.of([1]), BlockTable.of([2], first_block=1), BlockTable.of([])):
        for tables in (({"full": lacking}, whole), (whole, {"full": lacking})):
            with pytest.raises(IndexError):
                plan.runs(*tables, {"full": (0, 8)})


def test_reads_name_the_device_of_either_side() -> None:
    found = Runs(few=((0x4200, 0x7000, 96),)).reads(local_device=1, remote_device=3)
    assert (found.local.tolist(), found.remote.tolist()) == ([[0x4200, 96, 1]], [[0x7000, 96, 3]])
