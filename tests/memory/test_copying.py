"""Gather, scatter and zeroing touch exactly the bytes that plain loops would touch."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kvbus.geometry import (
    BlockTable,
    Box,
    EngineSpec,
    KvLayout,
    StatePart,
    canonical_order,
    lay_out_rank,
    state_group,
)
from kvbus.memory import Slot, gather, scatter, zero_positions
from tests.examples import num_examples
from tests.memory.boxes import (
    Case,
    Side,
    cases,
    copied_by_loops,
    held_heads_of,
    in_rank,
    in_slot,
    itemsize_of,
    slot_content,
)

EXHAUSTIVE = settings(
    max_examples=num_examples(500), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
SHORT = settings(EXHAUSTIVE, max_examples=num_examples(150))


@SHORT
@given(cases())
def test_gather_moves_exactly_the_bytes_that_loops_over_every_element_move(case: Case) -> None:
    side, before = case.prefill, case.prefill.bytes()
    elements = in_rank(side, case.box)
    expected = copied_by_loops(
        before,
        elements,
        slot_content(case.slot),
        in_slot(side.group, case.box, case.slot.order),
        itemsize_of(side.group),
    )

    num_bytes = gather(side.memory, side.table, case.box, case.slot)

    assert slot_content(case.slot) == expected
    assert side.bytes() == before
    assert num_bytes == len(elements) * itemsize_of(side.group)


@SHORT
@given(cases())
def test_scatter_moves_exactly_the_bytes_that_loops_over_every_element_move(case: Case) -> None:
    side, content = case.decode, slot_content(case.slot)
    elements = in_rank(side, case.box)
    expected = copied_by_loops(
        content,
        in_slot(side.group, case.box, case.slot.order),
        side.bytes(),
        elements,
        itemsize_of(side.group),
    )

    num_bytes = case.scatter()

    assert side.bytes() == expected
    assert slot_content(case.slot) == content
    assert num_bytes == len(elements) * itemsize_of(side.group)


@EXHAUSTIVE
@given(cases())
def test_what_one_rank_gathers_another_one_scatters_into_its_own_shape(case: Case) -> None:
    one, two = case.prefill, case.decode
    expected = copied_by_loops(
        one.bytes(),
        in_rank(one, case.box),
        two.bytes(),
        in_rank(two, case.box),
        itemsize_of(one.group),
    )

    gather(one.memory, one.table, case.box, case.slot)
    case.scatter()

    assert two.bytes() == expected


@SHORT
@given(cases())
def test_zeroing_clears_the_asked_for_positions_of_the_group_and_nothing_else(case: Case) -> None:
    side, heads = case.decode, held_heads_of(case.decode)
    everything = Box(
        side.group.name,
        side.group.layers,
        side.group.parts,
        heads.start,
        len(heads),
        case.box.start,
        case.box.stop,
    )
    expected = {name: bytearray(content) for name, content in side.bytes().items()}
    for segment, at in in_rank(side, everything).values():
        expected[segment][at : at + itemsize_of(side.group)] = bytes(itemsize_of(side.group))

    zero_positions(side.memory, side.table, case.box.start, case.box.stop)

    assert side.bytes() == expected


STATE = state_group("state", (3, 5), (StatePart("conv", 3, 10), StatePart("ssm", 2, 48)))


def _state_side(layout: str, seed: int) -> Side:
    engine = EngineSpec("e", "m", 1, (STATE,))
    rank = lay_out_rank(engine, 0, KvLayout.parse(layout), num_blocks=4)
    size = rank.segments[0].size_bytes
    content = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return Side(STATE, rank, {"kv": torch.from_numpy(content)}, BlockTable.of([seed]))


@pytest.mark.parametrize("part", ["conv", "ssm"])
@pytest.mark.parametrize("layout", ["NHD", "layer,block,kv,dim,token,head"])
def test_a_part_of_a_state_is_moved_byte_for_byte(part: str, layout: str) -> None:
    one, two = _state_side("NHD", 1), _state_side(layout, 2)
    box = Box("state", (3, 5), (part,), 1, 1, 0, 1)
    slot = Slot(torch.zeros(1000, dtype=torch.uint8), canonical_order())
    expected = copied_by_loops(one.bytes(), in_rank(one, box), two.bytes(), in_rank(two, box), 1)

    gather(one.memory, one.table, box, slot)
    scatter(two.memory, two.table, box, slot)

    assert two.bytes() == expected


def test_all_parts_of_a_state_are_zeroed_together() -> None:
    side = _state_side("NHD", 2)

    zero_positions(side.memory, side.table, 0, 1)

    for part, (units, _) in {part: STATE.part_shape(part) for part in STATE.parts}.items():
        box = Box("state", STATE.layers, (part,), 0, units, 0, 1)
        assert {side.bytes()["kv"][at] for _, at in in_rank(side, box).values()} == {0}
    assert any(side.bytes()["kv"])
