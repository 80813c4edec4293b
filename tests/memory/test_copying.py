"""Gather, scatter and zeroing touch exactly the bytes that plain loops touch, or refuse to."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kvbus.errors import GeometryError
from kvbus.geometry import (
    BlockTable,
    Box,
    EngineSpec,
    GroupSpec,
    KvLayout,
    KvPart,
    StatePart,
    canonical_order,
    lay_out_rank,
    slot_bytes,
    state_group,
)
from kvbus.memory import PagedMemory, Slot, copying, gather, scatter, zero_positions
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


def elsewhere(memory: PagedMemory) -> PagedMemory:
    """The same memory on what torch takes for another device than the slot's."""
    memory.device = torch.device("cpu", 0)
    return memory


@settings(
    max_examples=num_examples(600), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(cases())
def test_what_one_rank_gathers_another_one_scatters_into_its_own_shape(case: Case) -> None:
    one, two, box, slot = case.prefill, case.decode, case.box, case.slot
    itemsize, elements = itemsize_of(one.group), in_rank(one, box)
    lies = in_slot(one.group, box, slot.order)
    before, empty = one.bytes(), slot.buffer.clone()
    should_be = copied_by_loops(before, elements, slot_content(slot), lies, itemsize)

    num_gathered = gather(one.memory, one.table, box, slot)

    assert slot_content(slot) == should_be
    assert one.bytes() == before
    assert num_gathered == len(elements) * itemsize

    blocks = {name: buffer.clone() for name, buffer in two.buffers.items()}
    should_have = copied_by_loops(should_be, lies, two.bytes(), in_rank(two, box), itemsize)

    num_scattered = case.scatter()

    assert two.bytes() == should_have
    assert slot_content(slot) == should_be
    assert num_scattered == num_gathered

    slot.buffer.copy_(empty)
    for name, buffer in two.buffers.items():
        buffer.copy_(blocks[name])

    gather(elsewhere(one.memory), one.table, box, slot)
    scatter(elsewhere(two.memory), two.table, box, slot)

    assert two.bytes() == should_have
    num_bytes = slot_bytes(one.group, box, slot.order)
    assert torch.equal(slot.buffer[num_bytes:], empty[num_bytes:])


@settings(
    max_examples=num_examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(cases())
def test_zeroing_clears_the_asked_for_positions_of_the_group_and_nothing_else(case: Case) -> None:
    side, group, heads = case.decode, case.decode.group, held_heads_of(case.decode)
    span = case.box.start, case.box.stop
    everything = Box(group.name, group.layers, group.parts, heads.start, len(heads), *span)
    expected = {name: bytearray(content) for name, content in side.bytes().items()}
    for segment, at in in_rank(side, everything).values():
        expected[segment][at : at + itemsize_of(group)] = bytes(itemsize_of(group))

    zero_positions(side.memory, side.table, *span)

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


BLOCKS = {"apart": [7, 3, 9, 1], "in a row": [3, 4, 5, 6]}


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("head_dim", [8, 2048], ids=["short units", "long units"])
def test_nothing_of_a_copy_is_on_another_device(blocks: str, head_dim: int) -> None:
    group = GroupSpec("full", (0, 1), 16, 4, head_dim, "bfloat16")
    rank = lay_out_rank(EngineSpec("e", "m", 1, (group,)), 0, KvLayout.parse("NHD"), num_blocks=10)
    segment = rank.segments[0]
    buffer = torch.empty(segment.size_bytes, dtype=torch.uint8, device="meta")
    memory = PagedMemory(group, rank.regions, {segment.segment_id: buffer})
    table = BlockTable.of(BLOCKS[blocks])
    box = Box("full", (0, 1), (KvPart.KEY, KvPart.VALUE), 0, 4, 3, 64)
    slot = Slot(torch.empty(8 << 20, dtype=torch.uint8, device="meta"), canonical_order())

    copied = [copy(memory, table, box, slot) for copy in (gather, scatter)]
    zero_positions(memory, table, 5, 64)

    assert memory.device == torch.device("meta")
    assert copied == [2 * 2 * 61 * 4 * head_dim * 2] * 2
    assert (16 * 4 * head_dim * 2 >= copying.LARGE_UNIT_BYTES) == (head_dim == 2048)


GROUP = GroupSpec("full", tuple(range(6)), 4, 2, 8, "bfloat16")


def _plain_side(layout: str = "NHD") -> Side:
    engine = EngineSpec("e", "m", 1, (GROUP,))
    rank = lay_out_rank(engine, 0, KvLayout.parse(layout), num_blocks=8)
    size = rank.segments[0].size_bytes
    content = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    return Side(GROUP, rank, {"kv": content}, BlockTable.of([5, 0, 3]))


PLAIN_BOX = Box("full", (0, 1), GROUP.parts, 0, 2, 0, 12)


def _replaced(**changes: object) -> Box:
    return msgspec.structs.replace(PLAIN_BOX, **changes)


@pytest.mark.parametrize(
    ("box", "table", "message"),
    [
        (_replaced(layers=(0, 9)), [5, 0, 3], "layer 9"),
        (_replaced(parts=("latent",)), [5, 0, 3], "latent"),
        (_replaced(first_head=1), [5, 0, 3], "heads 0 to 2"),
        (_replaced(group="other"), [5, 0, 3], "'other'"),
        (_replaced(stop=13), [5, 0, 3], "table has 3"),
        (_replaced(stop=2**31 - 1), [5, 0, 3], "table has 3"),
        (_replaced(stop=0), [5, 0, 3], "no positions"),
        (PLAIN_BOX, [5, 8, 3], "block id 8"),
    ],
)
def test_a_box_or_a_table_beyond_the_ranks_memory_is_refused_before_a_byte_moves(
    box: Box, table: list[int], message: str
) -> None:
    side = _plain_side()
    slot = Slot(torch.zeros(10_000, dtype=torch.uint8), canonical_order())
    before = side.bytes()

    with pytest.raises(GeometryError, match=message):
        gather(side.memory, BlockTable.of(table), box, slot)
    with pytest.raises(GeometryError, match=message):
        scatter(side.memory, BlockTable.of(table), box, slot)

    assert not slot.buffer.any()
    assert side.bytes() == before


def test_a_box_larger_than_its_slot_is_refused_with_both_sizes() -> None:
    side = _plain_side()
    size = slot_bytes(GROUP, PLAIN_BOX, canonical_order())
    ring = torch.zeros(2 * size, dtype=torch.uint8)

    with pytest.raises(GeometryError, match=f"takes {size} bytes.* has {size - 1}"):
        gather(side.memory, side.table, PLAIN_BOX, Slot(ring[: size - 1], canonical_order()))

    assert not ring.any()


def test_a_table_that_starts_after_the_box_is_refused() -> None:
    side = _plain_side()
    slot = Slot(torch.zeros(10_000, dtype=torch.uint8), canonical_order())

    with pytest.raises(GeometryError, match="from block 1 on"):
        gather(side.memory, BlockTable.of([5, 0, 3], first_block=1), PLAIN_BOX, slot)
    with pytest.raises(GeometryError, match="from block 4 on"):
        gather(side.memory, BlockTable.of(list(range(8)), first_block=4), PLAIN_BOX, slot)


def test_a_region_that_leaves_its_buffer_is_refused() -> None:
    side = _plain_side()
    short = side.buffers["kv"][:5000]

    with pytest.raises(GeometryError, match="segment 'kv', which has 5000"):
        PagedMemory(GROUP, side.rank.regions, {"kv": short})
    with pytest.raises(GeometryError, match="which has 0"):
        PagedMemory(GROUP, side.rank.regions, {})


def test_zeroing_no_positions_needs_no_blocks() -> None:
    side = _plain_side()
    before = side.bytes()

    zero_positions(side.memory, BlockTable.of([]), 4, 4)

    assert side.bytes() == before
