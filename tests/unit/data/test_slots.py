"""Staging slots: tiles are packed, read, and unpacked through them, or blocks as they lie."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from kvbus.data import messages as wire
from kvbus.errors import ErrorCode, GeometryError, LocalError, SegmentError
from kvbus.geometry import BlockTable, Tile
from tests.support.data_process import GROUP, MIB, Data, add_plan
from tests.unit.data.conftest import MakeMemory, MakePair, code_of

HOST, BLOCK_BYTES, NUM_SLOTS = "host", 16 << 10, 3
TURN = wire.Turn("turn")


def open_slots(data: Data, slot_bytes: int = MIB) -> wire.SlotsOpened:
    asked = wire.OpenSlots(device=HOST, num_slots=NUM_SLOTS, slot_bytes=slot_bytes)
    opened: wire.SlotsOpened = data.call(asked)
    return opened


def tile(num_blocks: int) -> Tile:
    return Tile(GROUP, (0,), ("latent",), 0, 1, 0, num_blocks)


def gather(blocks: Sequence[int], slot: int) -> wire.GatherJob:
    """Gather blocks of memory 1."""
    table, whole = BlockTable.of(blocks), tile(len(blocks))
    return wire.GatherJob(memory=1, table=table, tile=whole, device=HOST, slot=slot, turn=TURN)


def scatter(memories: tuple[int, ...], blocks: Sequence[int], slot: int) -> wire.Scatter:
    place: dict[str, Any] = {"tile": tile(len(blocks)), "device": HOST, "slot": slot}
    return wire.Scatter(memories=memories, table=BlockTable.of(blocks), turn=TURN, **place)


def read_tile(address: int, num_bytes: int, slot: int) -> wire.ReadTile:
    there: dict[str, Any] = {"memory_kind": "DRAM", "remote_device": 0, "address": address}
    return wire.ReadTile(peer="holder", num_bytes=num_bytes, device=HOST, slot=slot, **there)


def test_a_tile_is_gathered_read_and_scattered(make_pair: MakePair, memory: MakeMemory) -> None:
    pair = make_pair(64, BLOCK_BYTES)
    reader, holder, second = pair.reader, pair.holder, memory(64, BLOCK_BYTES)
    reader.add(2, second, direct=False)
    slots = open_slots(holder)
    open_slots(reader)
    blobs = holder.metadata(devices=[HOST])

    gathered = holder.do(gather([9, 3, 5], 2))
    reader.call(wire.AddPeer(peer="holder", metadata=blobs))
    read = reader.do(read_tile(slots.address + 2 * MIB, 3 * BLOCK_BYTES, 1))
    scattered = reader.do(scatter((1, 2), [0, 1, 40], 1))

    assert [one.error for one in (gathered, read, scattered)] == [None] * 3
    assert gathered.num_bytes == read.num_bytes == 3 * BLOCK_BYTES
    assert scattered.num_bytes == 6 * BLOCK_BYTES
    assert gathered.seconds > 0
    for flat in (pair.ours, second):
        assert np.array_equal(flat.blocks[[0, 1, 40]], pair.theirs.blocks[[9, 3, 5]])
        assert not flat.blocks[2:40].any()


def test_blocks_are_read_as_they_lie_and_copied_out_of_the_slot(make_pair: MakePair) -> None:
    pair = make_pair(64, BLOCK_BYTES)
    reader = pair.reader
    open_slots(reader)
    reader.call(structs.replace(add_plan(2, 101, 1), slot_bytes=MIB))
    source, target = ({GROUP: BlockTable.of(ids)} for ids in ([9, 3, 5], [7, 1, 2]))
    place: dict[str, Any] = {"plan": 2, "index": 0, "tile": (0, 3), "device": HOST, "slot": 1}
    read = reader.do(wire.ReadStaged(source_tables=source, **place))
    copied = reader.do(wire.CopyStaged(target_tables=target, turn=TURN, **place))
    assert (read.error, copied.error) == (None, None)
    assert read.num_bytes == copied.num_bytes == 3 * BLOCK_BYTES
    assert np.array_equal(pair.ours.blocks[[7, 1, 2]], pair.theirs.blocks[[9, 3, 5]])
    assert not pair.ours.blocks[8:].any()


def test_positions_and_slots_are_zeroed(one: Data, memory: MakeMemory) -> None:
    flat = memory(8, BLOCK_BYTES, seed=1)
    before = flat.blocks.copy()
    one.add(1, flat, direct=False)
    open_slots(one)

    one.call(gather(range(8), 0))
    table = BlockTable.of(range(8))
    one.call(wire.Zero(memory=1, group=GROUP, table=table, span=(2, 5), turn=TURN))
    zeroed = flat.blocks.copy()
    one.call(wire.Wipe(device=HOST, slot=0))
    one.call(scatter((1,), range(8), 0))

    assert not zeroed[2:5].any()
    assert np.array_equal(zeroed[[0, 1, 5, 6, 7]], before[[0, 1, 5, 6, 7]])
    assert not flat.content.any()


def test_slots_and_jobs_that_cannot_be_are_refused(one: Data, memory: MakeMemory) -> None:
    with pytest.raises(SegmentError, match="does not fit"):
        one.call(wire.OpenSlots(device=HOST, num_slots=1 << 30, slot_bytes=1 << 30))
    with pytest.raises(SegmentError, match="does not fit"):
        one.call(wire.Wipe(device=HOST, slot=0))
    with pytest.raises(SegmentError, match=r"CUDA|GPU|NVIDIA"):
        one.call(wire.OpenSlots(device="GPU-0", num_slots=1, slot_bytes=4096))
    assert open_slots(one).memory_kind == "DRAM"
    with pytest.raises(LocalError, match="slots host is defined already"):
        open_slots(one)
    one.add(1, memory(1, BLOCK_BYTES), direct=False)
    for slot in (-1, NUM_SLOTS):
        with pytest.raises(GeometryError, match=f"slot {slot} of 3 slots"):
            one.call(gather([0], slot))

    (refused, *_) = logged(one)
    assert (refused.event, refused.fields["gpu"]) == ("staging.refused", "GPU-0")


def test_a_tile_larger_than_a_slot_is_not_read(make_pair: MakePair) -> None:
    pair = make_pair()
    open_slots(pair.reader, slot_bytes=4096)
    with pytest.raises(LocalError) as refused:
        pair.reader.call(read_tile(1 << 20, 4097, 0))
    assert refused.value.code is ErrorCode.INTERNAL


def test_slots_of_the_host_have_huge_pages_if_there_are_any(one: Data) -> None:
    address = open_slots(one, slot_bytes=16 * MIB).address
    words = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    assert (huge_bytes(one, address) >= 8 * MIB) == ("[never]" not in words)


def huge_bytes(data: Data, address: int) -> int:
    """Of the mapping with ``address``: NumPy's array need not begin where it does."""
    maps = Path(f"/proc/{data.process.pid}/smaps").read_text()
    for found in re.finditer(
        r"^([0-9a-f]+)-([0-9a-f]+) .*\n(?:^[A-Z].*\n)*?^AnonHugePages:\s+(\d+) kB", maps, re.M
    ):
        if int(found[1], 16) <= address < int(found[2], 16):
            return int(found[3]) << 10
    return 0


def logged(data: Data) -> list[wire.Log]:
    return [line for line in data.notices if isinstance(line, wire.Log)]


def test_a_job_that_is_aborted_while_it_waits_ends_at_once(one: Data, memory: MakeMemory) -> None:
    source, target = (memory(256, MIB, seed=seed) for seed in (1, 2))
    one.stop()
    numbers = [
        one.send(source.added(1, direct=False), [source.fd]),
        one.send(target.added(2, direct=False), [target.fd]),
        one.send(add_plan(3, 1, 2)),
        one.copy(3, range(256), range(256)),
    ]
    abort = one.send(wire.AbortJob(job=numbers[-1]))
    again = one.send(wire.AbortJob(job=numbers[-1]))
    one.go_on()

    assert one.wait(abort).error is one.wait(again).error is None
    ended = one.wait(numbers[-1])
    assert (code_of(ended), ended.num_bytes) == (ErrorCode.CANCELLED, 0)
    assert all(one.wait(number).error is None for number in numbers[:-1])


def test_a_copy_that_is_aborted_ends_between_two_parts(one: Data, memory: MakeMemory) -> None:
    source, target = memory(512, MIB), memory(512, MIB)
    one.add(1, source, direct=False)
    one.add(2, target, direct=False)
    one.call(add_plan(3, 1, 2))
    number = one.copy(3, range(512), range(512))
    one.call(wire.AbortJob(job=number))
    ended = one.wait(number)
    assert ended.num_bytes % MIB == 0
    assert code_of(ended) in (None, ErrorCode.CANCELLED)
    assert (ended.error is None) == (ended.num_bytes == 512 * MIB)
