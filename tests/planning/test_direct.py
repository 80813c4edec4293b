"""The descriptors of the direct path move exactly the bytes that plain loops would move."""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvbus.geometry import (
    Axis,
    AxisName,
    BlockTable,
    EngineSpec,
    GroupSpec,
    RankSpec,
    Region,
    Segment,
    validate_engine,
    validate_rank,
    validate_ranks,
)
from kvbus.planning import (
    Descriptors,
    DirectPlan,
    PlacedRank,
    ReadMap,
    Share,
    Spans,
    chunk_spans,
    direct,
    whole_spans,
)
from tests.examples import num_examples
from tests.planning.handoffs import Case, cases, where_elements_lie

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
MANY = settings(max_examples=num_examples(2000), deadline=None, suppress_health_check=SLOW)
SOME = settings(max_examples=num_examples(100), deadline=None, suppress_health_check=SLOW)


def copied_by_loops(case: Case) -> tuple[bytes, bytes]:
    """The decode side's memory afterwards, and how often each of its bytes is written."""
    after = bytearray(case.decode.memory)
    times = bytearray(len(after))
    for reader in case.decode.ranks.values():
        for meaning, at, num_bytes in where_elements_lie(case.decode, reader, case.moved()):
            after[at : at + num_bytes] = case.prefill.values[meaning]
            for byte in range(at, at + num_bytes):
                times[byte] += 1
    return bytes(after), bytes(times)


def read(case: Case, reads: Iterable[Descriptors]) -> tuple[bytes, bytes]:
    """The decode side's memory after the READs, and how often each of its bytes is written."""
    after = bytearray(case.decode.memory)
    times = bytearray(len(after))
    for descriptors in reads:
        for (to, size, _), (out_of, _, _) in zip(
            descriptors.local.tolist(), descriptors.remote.tolist(), strict=True
        ):
            at, source = to - case.decode.base, out_of - case.prefill.base
            assert 0 <= at <= at + size <= len(after)
            assert 0 <= source <= source + size <= len(case.prefill.memory)
            after[at : at + size] = case.prefill.memory[source : source + size]
            for byte in range(at, at + size):
                times[byte] += 1
    return bytes(after), bytes(times)


def plan_of(case: Case) -> DirectPlan:
    prefill, decode = case.prefill.ranks, case.decode.ranks
    shares = ReadMap(
        [placed.rank for placed in prefill.values()], [placed.rank for placed in decode.values()]
    ).shares(case.replica_index)
    return DirectPlan(prefill, decode, shares)


def spans_of(case: Case, start: int, stop: int) -> Spans:
    return whole_spans(case.decode.engine.groups, case.prefill.engine.groups, start, stop)


def descriptors_of(case: Case) -> Descriptors:
    spans = spans_of(case, case.start, case.stop)
    return plan_of(case).descriptors(case.prefill.tables, case.decode.tables, spans)


@MANY
@given(cases())
def test_reads_move_exactly_the_bytes_that_loops_over_every_element_move(case: Case) -> None:
    event(f"pp {case.prefill.engine.pp_size} to {case.decode.engine.pp_size}")
    expected = copied_by_loops(case)

    descriptors = descriptors_of(case)

    assert read(case, [descriptors]) == expected
    assert descriptors.num_bytes == sum(expected[1])


@SOME
@given(cases())
def test_reads_ascend_never_write_a_byte_twice_and_never_continue_each_other(case: Case) -> None:
    descriptors = descriptors_of(case)
    local, remote = descriptors.local.astype(np.int64), descriptors.remote.astype(np.int64)

    ends = local[:-1, 0] + local[:-1, 1]
    adjoin = (ends == local[1:, 0]) & (remote[:-1, 0] + remote[:-1, 1] == remote[1:, 0])

    assert (ends <= local[1:, 0]).all()
    assert not adjoin.any()
    assert (local[:, 1] == remote[:, 1]).all()
    assert (local[:, 1] > 0).all()
    assert not local[:, 2].any()
    assert not remote[:, 2].any()


@settings(SOME, max_examples=num_examples(300))
@given(cases(), st.data())
def test_few_runs_by_integers_are_those_by_arrays(case: Case, data: st.DataObject) -> None:
    start = data.draw(st.integers(case.start, case.stop))
    stop = data.draw(st.integers(start, case.stop))
    whole, groups = (case.start, case.stop), (case.decode.engine.groups, case.prefill.engine.groups)
    spans = chunk_spans(*groups, whole, (start, stop), last=data.draw(st.booleans()))
    plan, tables = plan_of(case), (case.prefill.tables, case.decode.tables)

    by_integers = plan.descriptors(*tables, spans)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "MAX_RUNS", -1)
        by_arrays = plan.descriptors(*tables, spans)

    event("few" if len(by_arrays.local) <= direct.MAX_RUNS else "many")
    assert by_integers.local.tolist() == by_arrays.local.tolist()
    assert by_integers.remote.tolist() == by_arrays.remote.tolist()


def test_a_plan_of_one_full_block_has_few_runs_and_of_a_part_of_it_perhaps_many() -> None:
    shape = {"num_blocks": 4, "block_size": 16, "num_layers": 40}
    placed = _one_region(0, **shape)
    plan = _plan(placed, placed)
    table = {"full": BlockTable.of([2])}

    whole = plan.descriptors(table, table, {"full": (0, 16)})
    part = plan.descriptors(table, table, {"full": (0, 15)})

    assert (len(whole.local), len(part.local)) == (1, 80)
    assert plan.num_descriptors({"full": (0, 15)}) <= direct.MAX_RUNS < 80
    assert plan._has_few({"full": (0, 16)})
    assert not plan._has_few({"full": (0, 15)})


@SOME
@given(cases(), st.data())
def test_a_plan_answers_again_as_if_asked_for_the_first_time(
    case: Case, data: st.DataObject
) -> None:
    first = data.draw(st.integers(case.start, case.stop))
    plan, tables = plan_of(case), (case.prefill.tables, case.decode.tables)
    plan.descriptors(*tables, spans_of(case, first, case.stop))

    again = plan.descriptors(*tables, spans_of(case, case.start, case.stop))

    assert (again.local == descriptors_of(case).local).all()
    assert (again.remote == descriptors_of(case).remote).all()


@settings(SOME, max_examples=num_examples(300))
@given(cases(), st.data())
def test_the_chunks_of_a_fetch_move_what_the_whole_moves_each_byte_once(
    case: Case, data: st.DataObject
) -> None:
    plan, groups = plan_of(case), case.prefill.engine.groups
    cuts = data.draw(st.lists(st.integers(case.start, case.stop), max_size=4).map(sorted))
    ends = [case.start, *cuts, case.stop]
    reads = []
    for number, (start, stop) in enumerate(pairwise(ends), start=2):
        last = number == len(ends)
        whole, readers = (case.start, case.stop), case.decode.engine.groups
        spans = chunk_spans(readers, groups, whole, (start, stop), last=last)
        tables = {
            group.name: grown_to(case.prefill.tables[group.name], spans[group.name][1], group)
            for group in groups
            if spans[group.name][0] < spans[group.name][1]
        }
        reads.append(plan.descriptors(tables, case.decode.tables, spans))

    assert read(case, reads) == copied_by_loops(case)


def grown_to(table: BlockTable, stop: int, group: GroupSpec) -> BlockTable:
    """The table when the offer had just got its first ``stop`` positions."""
    num_blocks = -(-stop // group.block_size) - table.first_block
    return BlockTable.of(table.array()[:num_blocks], first_block=table.first_block)


@SOME
@given(cases())
def test_the_generated_engines_are_possible(case: Case) -> None:
    for side in (case.prefill, case.decode):
        ranks = [placed.rank for placed in side.ranks.values()]

        validate_engine(side.engine)
        for rank in ranks:
            validate_rank(side.engine, rank)
        validate_ranks(side.engine, ranks)


def _one_region(
    base: int, *, num_blocks: int, block_size: int, num_layers: int = 1
) -> dict[int, PlacedRank]:
    group = GroupSpec("full", tuple(range(num_layers)), block_size, 2, 4, "float16")
    token = 2 * 2 * 4
    layer = 2 * block_size * token
    axes = (
        Axis(AxisName.BLOCK, num_blocks, num_layers * layer),
        Axis(AxisName.LAYER, num_layers, layer),
        Axis(AxisName.KV, 2, block_size * token),
        Axis(AxisName.TOKEN, block_size, token),
        Axis(AxisName.HEAD, 2, 8),
        Axis(AxisName.DIM, 4, 2),
    )
    region = Region("kv", 0, "full", group.layers, group.parts, 0, 2, axes)
    rank = RankSpec(0, (Segment("kv", num_blocks * num_layers * layer),), (region,))
    return {0: PlacedRank(EngineSpec("e", "m", 1, (group,)), rank, {"kv": base})}


def _plan(prefill: dict[int, PlacedRank], decode: dict[int, PlacedRank]) -> DirectPlan:
    return DirectPlan(prefill, decode, ReadMap([prefill[0].rank], [decode[0].rank]).shares())


def test_whole_blocks_of_equal_engines_are_one_read_each_and_neighbours_are_one_together() -> None:
    plan = _plan(
        _one_region(1 << 20, num_blocks=8, block_size=4),
        _one_region(1 << 30, num_blocks=8, block_size=4),
    )

    found = plan.descriptors(
        {"full": BlockTable.of([2, 3, 6])}, {"full": BlockTable.of([4, 5, 1])}, {"full": (0, 12)}
    )

    block = 2 * 4 * 16
    assert found.local.tolist() == [
        [(1 << 30) + block, block, 0],
        [(1 << 30) + 4 * block, 2 * block, 0],
    ]
    assert found.remote.tolist() == [
        [(1 << 20) + 6 * block, block, 0],
        [(1 << 20) + 2 * block, 2 * block, 0],
    ]


@pytest.mark.parametrize("max_runs", [-1, direct.MAX_RUNS])
def test_runs_that_continue_each_other_on_one_side_only_stay_apart(
    max_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "MAX_RUNS", max_runs)
    placed = _one_region(0, num_blocks=8, block_size=4)
    in_order, scattered = {"full": BlockTable.of([1, 2])}, {"full": BlockTable.of([3, 5])}

    for remote, local in ((in_order, scattered), (scattered, in_order)):
        found = _plan(placed, placed).descriptors(remote, local, {"full": (0, 8)})

        assert len(found.local) == 2


def test_a_share_of_some_layers_parts_and_heads_moves_nothing_else() -> None:
    prefill = _one_region(1 << 20, num_blocks=4, block_size=2, num_layers=3)
    decode = _one_region(1 << 30, num_blocks=4, block_size=2, num_layers=3)
    share = Share(0, 0, "full", (1,), ("v",), first_head=1, num_heads=1)

    found = DirectPlan(prefill, decode, [share]).descriptors(
        {"full": BlockTable.of([3])}, {"full": BlockTable.of([2])}, {"full": (0, 2)}
    )

    layer, part, token, head = 64, 32, 16, 8
    inside = [layer + part + head, layer + part + token + head]
    assert found.local[:, :2].tolist() == [[(1 << 30) + 2 * 192 + at, 8] for at in inside]
    assert found.remote[:, :2].tolist() == [[(1 << 20) + 3 * 192 + at, 8] for at in inside]


def test_the_estimate_of_reads_is_exact_for_whole_blocks_that_do_not_adjoin() -> None:
    plan = _plan(
        _one_region(1 << 20, num_blocks=8, block_size=4),
        _one_region(1 << 30, num_blocks=8, block_size=2),
    )
    tables = {"full": BlockTable.of([4, 1])}, {"full": BlockTable.of([1, 7, 3, 5])}

    found = plan.descriptors(*tables, {"full": (0, 8)})

    assert plan.num_descriptors({"full": (0, 8)}) == len(found.local) == 8


@pytest.mark.parametrize(
    "table",
    [BlockTable.of([1]), BlockTable.of([1, 2], first_block=1), BlockTable.of([])],
    ids=["too_short", "starts_too_late", "empty"],
)
def test_a_table_that_does_not_cover_the_tokens_is_refused_on_either_side(
    table: BlockTable,
) -> None:
    placed = _one_region(0, num_blocks=8, block_size=4)
    plan = _plan(placed, placed)
    whole = {"full": BlockTable.of([0, 1])}

    with pytest.raises(IndexError):
        plan.descriptors({"full": table}, whole, {"full": (0, 8)})
    with pytest.raises(IndexError):
        plan.descriptors(whole, {"full": table}, {"full": (0, 8)})


def test_a_group_without_positions_needs_no_tables() -> None:
    placed = _one_region(0, num_blocks=8, block_size=4)

    found = _plan(placed, placed).descriptors({}, {}, {"full": (5, 5)})

    assert found.num_bytes == 0
    assert found.local.shape == found.remote.shape == (0, 3)
    assert found.local.dtype == found.remote.dtype == np.uint64
