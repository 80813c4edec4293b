"""Blocks that are read into slots as they lie there and copied on move what plain loops move."""

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvbus.geometry import BlockTable, EngineSpec, GroupSpec, KvLayout
from kvbus.planning import ReadMap, StagedPlan, bytes_by_group, span_bytes, staged_plans
from tests.unit.planning.handoffs import Case, cases, copied_by_loops, move, placed_ranks, some

SLOT_AT = 1 << 40


def plans_of(case: Case, slot_bytes: int) -> tuple[StagedPlan, ...]:
    joined = ReadMap(*case.ranks).joined(case.replica_index)
    return staged_plans(case.prefill.ranks, case.decode.ranks, joined, slot_bytes=slot_bytes)


@some(1000, share=12)
@given(cases(), st.integers(64, 4096), st.integers(1, 2000))
def test_staged_plan_moves_bytes_as_loops(case: Case, slot_bytes: int, tile_bytes: int) -> None:
    spans, expected = case.spans(), copied_by_loops(case)
    after = np.frombuffer(case.decode.memory, np.uint8).copy()
    times, num_read = np.zeros_like(after), 0

    plans = plans_of(case, slot_bytes)
    for plan in plans:
        for tile in plan.tiles(spans[plan.group], tile_bytes=min(tile_bytes, slot_bytes)):
            slot, written = np.zeros(slot_bytes, np.uint8), np.zeros(slot_bytes, np.uint8)
            reads = plan.reads(case.prefill.tables, tile, slot_at=SLOT_AT)
            move(reads, (case.prefill.memory, case.prefill.base), (slot, SLOT_AT), written)
            assert written.max() == 1
            num_read += reads.num_bytes
            copies = plan.copies(case.decode.tables, tile, slot_at=SLOT_AT)
            move(copies, (slot.tobytes(), SLOT_AT), (after, case.decode.base), times)

    event("staged" if plans else "a block fits no slot")
    if plans or not sum(expected[1]):
        assert (after.tobytes(), times.tobytes()) == expected
        joined = ReadMap(*case.ranks).joined(case.replica_index)
        assert num_read <= span_bytes(bytes_by_group(joined, case.prefill.engine), spans)


GROUP = GroupSpec("full", (0, 1), 16, 8, 8, "float16")
BLOCK_BYTES = 2 * 2 * 16 * 8 * 8 * 2  # layers, parts, tokens, heads, dims and their bytes


@pytest.mark.parametrize(
    ("prefill", "decode", "num_runs"),
    [
        ((1, "NHD"), (2, "NHD"), 4 * 2),  # a run for each layer of a block
        ((2, "NHD"), (1, "NHD"), 4 * 2 * 2),  # and for each holder
        ((1, "HND"), (1, "NHD"), 4 * 2),
        ((1, "HND"), (4, "NHD"), 4 * 2),
    ],
)
def test_staged_reads_have_long_runs(
    prefill: tuple[int, str], decode: tuple[int, str], num_runs: int
) -> None:
    holders, readers = (
        placed_ranks(EngineSpec("e", "m", tp, (GROUP,)), KvLayout.parse(layout))
        for tp, layout in (prefill, decode)
    )
    ranks = [[placed.rank for placed in side.values()] for side in (holders, readers)]
    plans = staged_plans(holders, readers, ReadMap(*ranks).joined(), slot_bytes=4 * BLOCK_BYTES)
    tables = {"full": BlockTable.of([1, 7, 3, 5])}
    reads = [plan.reads(tables, (0, 64), slot_at=SLOT_AT).reads() for plan in plans]
    assert sum(len(one.local) for one in reads) == num_runs
    assert sum(plan.num_runs({"full": (0, 64)}) for plan in plans) == num_runs
    assert sum(one.num_bytes for one in reads) == 4 * BLOCK_BYTES


def test_a_block_that_fits_no_slot_is_not_staged() -> None:
    ranks = placed_ranks(EngineSpec("e", "m", 1, (GROUP,)), KvLayout.parse("NHD"))
    joined = ReadMap(*2 * [[placed.rank for placed in ranks.values()]]).joined()
    one_layer, none = (
        staged_plans(ranks, ranks, joined, slot_bytes=BLOCK_BYTES // 2 - less) for less in (0, 1)
    )
    assert len(one_layer) == 2
    assert not none
