"""Reads and copies of a plan move exactly the bytes that plain loops move, however they are cut."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
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
    Side,
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


@some(400, share=16)
@given(cases())
def test_runs_are_divided_by_the_memory_of_their_targets(case: Case) -> None:
    runs, found = case.runs(), list[tuple[int, int, int]]()
    for placed in case.decode.ranks.values():
        starts = [(placed.addresses[one.segment_id], one) for one in placed.rank.segments]
        extents = [(at, at + segment.size_bytes) for at, segment in starts]
        mine = list(runs.with_targets_in(extents))
        assert all(any(at <= target < end for at, end in extents) for target, _, _ in mine)
        found += mine

    assert sorted(found) == sorted(runs)


NUM_TOKENS, JOB_BYTES = 1500, 1 << 20
Numbers = npt.NDArray[Any]


@pytest.mark.parametrize(
    ("decode_layout", "decode_block"), [("NHD", 16), ("HND", 16), ("NHD", 48)], ids=str
)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1), (4, 2)], ids=str)
def test_a_handoff_that_no_cache_holds_moves_what_numpy_moves(
    sizes: tuple[int, int], decode_layout: str, decode_block: int
) -> None:
    prefill = one_layer(sizes[0], "NHD", 16, base=8 << 30)
    decode = one_layer(sizes[1], decode_layout, decode_block, base=0)
    case = Case(prefill, decode, 0, NUM_TOKENS, replica_index=0)
    held = np.concatenate([rank[places(prefill)] for rank in arrays(prefill, "NHD")], axis=2)
    expected = arrays(decode, decode_layout)
    for rank, heads in zip(expected, np.split(held, sizes[1], axis=2), strict=True):
        rank[places(decode)] = heads

    reads = case.runs().reads()
    jobs = case.runs().cut(JOB_BYTES)

    for runs in (reads_in(reads), (run for job in jobs for run in job)):
        after, times = copied(case, runs)
        assert after == in_memory(expected, decode_layout).tobytes()
        assert max(times) == 1
    assert max(job.num_bytes for job in jobs) <= JOB_BYTES


def one_layer(tp_size: int, layout: str, block: int, *, base: int) -> Side:
    """An engine of 4 heads whose blocks lie anywhere."""
    random, num_blocks = np.random.default_rng(base), -(-NUM_TOKENS // block)
    engine = EngineSpec("e", "m", tp_size, (GroupSpec("full", (0,), block, 4, 64, "float16"),))
    parsed = KvLayout.parse(layout)
    ranks = placed_ranks(engine, parsed, num_blocks=num_blocks + 2, base=base)
    size_bytes = sum(placed.rank.segments[0].size_bytes for placed in ranks.values())
    table = BlockTable.of(random.permutation(num_blocks + 2)[:num_blocks])
    return Side(engine, ranks, base, {"full": table}, random.bytes(size_bytes))


def arrays(side: Side, layout: str) -> Numbers:
    """A copy of its memory: [rank, block, part, token, head, dim]."""
    num_ranks, block = len(side.ranks), side.engine.groups[0].block_size
    inner = (block, 4 // num_ranks) if layout == "NHD" else (4 // num_ranks, block)
    numbers = np.frombuffer(side.memory, np.uint16).reshape(num_ranks, -1, 2, *inner, 64)
    return in_memory(numbers.copy(), layout)


def in_memory(numbers: Numbers, layout: str) -> Numbers:
    """The axes turned into the order of the layout, or back."""
    return numbers if layout == "NHD" else numbers.swapaxes(3, 4)


def places(side: Side) -> tuple[Numbers, slice, Numbers]:
    """Where an array has the tokens: [token, part, head, dim]."""
    blocks, tokens = np.divmod(np.arange(NUM_TOKENS), side.engine.groups[0].block_size)
    return side.tables["full"].array()[blocks], slice(None), tokens


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
