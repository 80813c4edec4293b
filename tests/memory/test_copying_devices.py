"""Copies are made beside the memory: each tensor of a move is there, its indices included.

The meta device, where nothing has bytes, stands for any device that is not the host's.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kvbus.geometry import (
    BlockTable,
    Box,
    EngineSpec,
    GroupSpec,
    KvLayout,
    KvPart,
    canonical_order,
    lay_out_rank,
    slot_bytes,
)
from kvbus.memory import PagedMemory
from kvbus.memory.copying import LARGE_UNIT_BYTES, Slot, gather, scatter, zero_positions
from tests.examples import num_examples
from tests.memory.boxes import Case, cases, in_slot, itemsize_of, slot_content

MANY = settings(
    max_examples=num_examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
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
    assert (16 * 4 * head_dim * 2 >= LARGE_UNIT_BYTES) == (head_dim == 2048)


def elsewhere(memory: PagedMemory) -> PagedMemory:
    """The same memory on what torch takes for another device than the slot's."""
    memory.device = torch.device("cpu", 0)
    return memory


@MANY
@given(cases())
def test_a_slot_on_another_device_gets_the_same_bytes(case: Case) -> None:
    side, slot = case.prefill, case.slot
    size = slot_bytes(side.group, case.box, slot.order)
    num_bytes = gather(side.memory, side.table, case.box, slot)
    wanted = slot_content(slot)["slot"]
    slot.buffer[:size].zero_()

    num_again = gather(elsewhere(side.memory), side.table, case.box, slot)

    found, itemsize = slot_content(slot)["slot"], itemsize_of(side.group)
    starts = [at for _, at in in_slot(side.group, case.box, slot.order).values()]
    assert num_again == num_bytes == len(starts) * itemsize
    assert all(found[at : at + itemsize] == wanted[at : at + itemsize] for at in starts)
    assert found[size:] == wanted[size:]


@MANY
@given(cases())
def test_a_slot_on_another_device_is_scattered_like_any_other(case: Case) -> None:
    side = case.decode
    case.slot.buffer.random_()
    before = {name: buffer.clone() for name, buffer in side.buffers.items()}
    scatter(side.memory, side.table, case.box, case.slot)
    wanted = side.bytes()
    for name, buffer in side.buffers.items():
        buffer.copy_(before[name])

    scatter(elsewhere(side.memory), side.table, case.box, case.slot)

    assert side.bytes() == wanted
