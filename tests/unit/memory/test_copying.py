"""What goes through staging slots arrives byte for byte, or is refused before a byte moves."""

import tracemalloc
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbus.errors import GeometryError
from kvbus.geometry import (
    BlockTable,
    EngineSpec,
    GroupSpec,
    KvLayout,
    Tile,
    lay_out_rank,
    slot_bytes,
)
from kvbus.memory.copying import ByteRange, PagedMemory
from tests.unit.memory.in_memory import (
    HostRoom,
    InMemory,
    move_through_slots,
    zero_what_is_moved,
    zeroed_by_loops,
)
from tests.unit.planning.handoffs import Case, cases, copied_by_loops, some

HEAD_DIMS = (1, 2, 3, 8, 16)


@some(1000, share=8)
@given(cases(HEAD_DIMS), st.integers(1, 60), st.sampled_from([0, 3, 8, 16]))
def test_gathered_slots_arrive_everywhere(case: Case, room: int, aligned_to: int) -> None:
    prefill, decode = InMemory(case.prefill), InMemory(case.decode)

    new_slot = partial(HostRoom, offset_bytes=aligned_to)

    move_through_slots(case, prefill, decode, room=room, new_slot=new_slot)

    assert decode.content() == copied_by_loops(case)[0]
    assert prefill.content() == case.prefill.memory


@some(200)
@given(cases(HEAD_DIMS))
def test_zeroing_clears_only_asked_positions_of_each_group(case: Case) -> None:
    decode = InMemory(case.decode)
    zero_what_is_moved(case, decode)
    assert decode.content() == zeroed_by_loops(case)


GROUP = GroupSpec("full", tuple(range(6)), 4, 2, 8, "bfloat16")
RANK = lay_out_rank(EngineSpec("e", "m", 2, (GROUP,), 2), 0, KvLayout.parse("NHD"), num_blocks=8)
"""One of two heads, and of the first three layers."""
TILE = Tile("full", (0, 1), GROUP.parts, 0, 1, 0, 12)
TILE_BYTES = slot_bytes(GROUP, TILE)
TABLE = BlockTable.of([5, 0, 3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (0, 9)}, "no layers 9"),
        ({"layers": (0, 3)}, "heads 0 to 0 of full/3/k"),
        ({"parts": ("latent",)}, "no parts latent"),
        ({"first_head": 1}, "heads 0 to 1 of full/0/k"),
        ({"first_head": 2}, "heads 2 to 3 of 2"),
        ({"group": "other"}, "'other'"),
        ({"stop": 13}, "table has 3"),
        ({"stop": 2**31 - 1}, "table has 3"),
        ({"stop": 0}, "no positions"),
        ({"table": BlockTable.of([5, 8, 3])}, "block id 8"),
        ({"table": BlockTable.of([5, 0], first_block=1)}, "from block 1 on"),
        ({"room": TILE_BYTES - 1}, f"takes {TILE_BYTES} bytes.* has {TILE_BYTES - 1}"),
    ],
)
@pytest.mark.parametrize("copy", [PagedMemory.gather, PagedMemory.scatter])
def test_tile_beyond_memory_is_refused(copy: Any, changes: dict[str, Any], message: str) -> None:
    memory = np.arange(RANK.segments[0].size_bytes).astype(np.uint8)
    ring, before = np.zeros(2 * TILE_BYTES, np.uint8), memory.copy()
    changes = {"table": TABLE, "room": TILE_BYTES} | changes
    table, room = changes.pop("table"), changes.pop("room")
    paged = PagedMemory(GROUP, RANK.regions, {"kv": ByteRange.of(memory)})
    with pytest.raises(GeometryError, match=message):
        copy(paged, table, replace(TILE, **changes), ByteRange.of(ring[:room]))
    assert not ring.any()
    assert np.array_equal(memory, before)


def test_a_region_that_leaves_its_buffer_is_refused() -> None:
    with pytest.raises(GeometryError, match="segment 'kv', which has 5000"):
        PagedMemory(GROUP, RANK.regions, {"kv": ByteRange(1 << 20, 5000)})
    with pytest.raises(GeometryError, match="which has 0"):
        PagedMemory(GROUP, RANK.regions, {})


def test_what_is_kept_of_tiles_that_readers_choose_is_bounded() -> None:
    """A reader may ask for any choice of layers, in any order."""
    group = GroupSpec("full", tuple(range(8)), 16, 2, 8, "float16")
    rank = lay_out_rank(EngineSpec("e", "m", 1, (group,)), 0, KvLayout.parse("NHD"), num_blocks=1)
    buffer = np.zeros(rank.segments[0].size_bytes, np.uint8)
    memory, layers = PagedMemory(group, rank.regions, {"kv": ByteRange.of(buffer)}), list(range(8))
    room, kept_bytes = buffer.copy(), []

    tracemalloc.start()
    for number in range(900):
        Random(number).shuffle(layers)
        tile = Tile("full", tuple(layers), ("k", "v"), 0, 2, 0, 16)
        memory.gather(BlockTable.of([0]), tile, ByteRange.of(room))
        kept_bytes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()

    assert kept_bytes[-1] - kept_bytes[300] < kept_bytes[300] - kept_bytes[0]
