"""The descriptors of the direct path move exactly the bytes that plain loops would move."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    Axis,
    AxisName,
    BlockTable,
    EngineSpec,
    GroupSpec,
    RankSpec,
    Region,
    Segment,
    num_blocks_for,
)
from kvbus.planning import Descriptors, DirectPlan, PlacedRank
from tests.geometry.layouts import Element, byte_offset, elements, engines, group_specs, ranks

EXHAUSTIVE = settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Side:
    """One engine, its memory as one buffer, and where it lies."""

    ranks: tuple[PlacedRank, ...]
    memory: bytes
    base: int
    tables: Mapping[str, BlockTable]

    def at(self, address: int) -> int:
        return address - self.base


@dataclass(frozen=True)
class Case:
    prefill: Side
    decode: Side
    start: int
    stop: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two engines of equal groups and ranks, and tokens [start, stop) of a request."""
    groups = draw(group_specs())
    tp_size = draw(st.integers(1, 2))
    start = draw(st.integers(0, 9))
    stop = start + draw(st.integers(0, 9))
    prefill = draw(_sides(groups, tp_size, start, stop, base=1 << 40))
    decode = draw(_sides(groups, tp_size, start, stop, base=7 << 32))
    return Case(prefill, decode, start, stop)


@st.composite
def _sides(
    draw: st.DrawFn,
    groups: tuple[GroupSpec, ...],
    tp_size: int,
    start: int,
    stop: int,
    *,
    base: int,
) -> Side:
    engine = draw(engines(groups, tp_size=tp_size))
    tables, num_blocks = {}, 1
    for group in engine.groups:
        first = max(0, start // group.block_size - draw(st.integers(0, 1)))
        count = num_blocks_for(stop, group.block_size) - first + draw(st.integers(0, 1))
        tables[group.name] = (max(count, 0), first)
        num_blocks = max(num_blocks, count + 1)
    order = draw(st.permutations(range(num_blocks)))
    placed, end = [], base
    for number in range(tp_size):
        rank = draw(ranks(engine, number, num_blocks=num_blocks))
        addresses = {}
        for segment in rank.segments:
            addresses[segment.segment_id] = end
            end += segment.size_bytes + 3
        placed.append(PlacedRank(engine, rank, addresses))
    memory = np.random.default_rng(draw(st.integers(0, 255))).bytes(end - base)
    made = {name: BlockTable.of(order[:n], first_block=at) for name, (n, at) in tables.items()}
    return Side(tuple(placed), memory, base, made)


def copied_by_loops(case: Case) -> tuple[bytes, int]:
    """The decode side's memory afterwards, and how many bytes were copied into it."""
    after, num_bytes = bytearray(case.decode.memory), 0
    for holder, reader in zip(case.prefill.ranks, case.decode.ranks, strict=True):
        sources = addresses_by_meaning(case.prefill, holder, case)
        targets = addresses_by_meaning(case.decode, reader, case)
        for meaning, (target, itemsize) in targets.items():
            if meaning not in sources:
                continue
            source, _ = sources[meaning]
            after[target : target + itemsize] = case.prefill.memory[source : source + itemsize]
            num_bytes += itemsize
    return bytes(after), num_bytes


def addresses_by_meaning(
    side: Side, placed: PlacedRank, case: Case
) -> dict[object, tuple[int, int]]:
    """Index in the side's memory of every element of the tokens that are asked for."""
    found: dict[object, tuple[int, int]] = {}
    for region in placed.rank.regions:
        group = placed.engine.group(region.group)
        table = side.tables[group.name]
        itemsize = DTYPE_SIZES_BYTES[group.dtype]
        for position in range(case.start, case.stop):
            block = int(table.array()[position // group.block_size - table.first_block])
            token = position % group.block_size
            for layer in region.layers:
                for part in region.parts:
                    for head in range(region.first_head, region.first_head + region.num_heads):
                        for dim in range(group.head_dim):
                            where = Element(block, layer, part, token, head, dim)
                            address = placed.addresses[region.segment_id]
                            index = side.at(address + byte_offset(region, where))
                            found[position, layer, part, head, dim] = (index, itemsize)
    return found


def applied(case: Case, descriptors: Descriptors) -> bytes:
    """The decode side's memory after the READs."""
    after = bytearray(case.decode.memory)
    for (to, size, _), (source, _, _) in zip(
        descriptors.local.tolist(), descriptors.remote.tolist(), strict=True
    ):
        at, out_of = case.decode.at(to), case.prefill.at(source)
        assert 0 <= at <= at + size <= len(after)
        assert 0 <= out_of <= out_of + size <= len(case.prefill.memory)
        after[at : at + size] = case.prefill.memory[out_of : out_of + size]
    return bytes(after)


def descriptors_of(case: Case) -> Descriptors:
    plan = DirectPlan(case.prefill.ranks, case.decode.ranks)
    return plan.descriptors(
        case.prefill.tables, case.decode.tables, start=case.start, stop=case.stop
    )


@EXHAUSTIVE
@given(cases())
def test_reads_move_exactly_the_bytes_that_loops_over_every_element_move(case: Case) -> None:
    expected, num_bytes = copied_by_loops(case)

    descriptors = descriptors_of(case)

    assert applied(case, descriptors) == expected
    assert descriptors.num_bytes == num_bytes


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.integers(0, 9), st.integers(0, 9))
def test_a_plan_answers_again_as_if_asked_for_the_first_time(
    case: Case, one: int, two: int
) -> None:
    first, last = sorted((min(case.start + one, case.stop), min(case.start + two, case.stop)))
    plan = DirectPlan(case.prefill.ranks, case.decode.ranks)
    tables = case.prefill.tables, case.decode.tables
    plan.descriptors(*tables, start=first, stop=last)

    again = plan.descriptors(*tables, start=case.start, stop=case.stop)

    assert (again.local == descriptors_of(case).local).all()
    assert (again.remote == descriptors_of(case).remote).all()


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_the_generated_ranks_hold_each_element_at_bytes_of_its_own(case: Case) -> None:
    for placed in (*case.prefill.ranks, *case.decode.ranks):
        starts = [
            (region.segment_id, byte_offset(region, element))
            for region in placed.rank.regions
            for element in elements(region, placed.engine.group(region.group))
        ]

        assert len(set(starts)) == len(starts)


def _one_region(base: int, *, num_blocks: int, block_size: int) -> PlacedRank:
    group = GroupSpec("full", (0,), block_size, 2, 4, "float16")
    token = 2 * 2 * 4
    axes = (
        Axis(AxisName.BLOCK, num_blocks, 2 * block_size * token),
        Axis(AxisName.KV, 2, block_size * token),
        Axis(AxisName.TOKEN, block_size, token),
        Axis(AxisName.HEAD, 2, 8),
        Axis(AxisName.DIM, 4, 2),
    )
    region = Region("kv", 0, "full", (0,), group.parts, 0, 2, axes)
    size = num_blocks * 2 * block_size * token
    rank = RankSpec(0, (Segment("kv", size),), (region,))
    return PlacedRank(EngineSpec("e", "m", 1, (group,)), rank, {"kv": base})


def test_whole_blocks_of_equal_engines_are_one_read_each_and_neighbours_are_one_together() -> None:
    sides = (
        _one_region(1 << 20, num_blocks=8, block_size=4),
        _one_region(1 << 30, num_blocks=8, block_size=4),
    )
    plan = DirectPlan(sides[:1], sides[1:])

    found = plan.descriptors(
        {"full": BlockTable.of([2, 3, 6])}, {"full": BlockTable.of([4, 5, 1])}, start=0, stop=12
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


@pytest.mark.parametrize(
    "table",
    [BlockTable.of([1]), BlockTable.of([1, 2], first_block=1), BlockTable.of([])],
    ids=["too_short", "starts_too_late", "empty"],
)
def test_a_table_that_does_not_cover_the_tokens_is_refused_on_either_side(
    table: BlockTable,
) -> None:
    placed = _one_region(0, num_blocks=8, block_size=4)
    plan = DirectPlan([placed], [placed])
    whole = {"full": BlockTable.of([0, 1])}

    with pytest.raises(IndexError):
        plan.descriptors({"full": table}, whole, start=0, stop=8)
    with pytest.raises(IndexError):
        plan.descriptors(whole, {"full": table}, start=0, stop=8)
