"""A box, table, slot or region that reaches too far is refused before a byte moves."""

import msgspec
import pytest
import torch

from kvbus.errors import GeometryError
from kvbus.geometry import (
    BlockTable,
    Box,
    EngineSpec,
    GroupSpec,
    KvLayout,
    canonical_order,
    lay_out_rank,
    slot_bytes,
)
from kvbus.memory import PagedMemory, Slot, gather, scatter, zero_positions
from tests.memory.boxes import Side

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
