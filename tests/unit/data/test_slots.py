"""Staging slots: tiles are packed, read, and unpacked through them, or blocks as they lie."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from kvbus.data import messages as wire
from kvbus.errors import ErrorCode, GeometryError, LocalError, SegmentError
from kvbus.geometry import BlockTable, Tile
from kvbus.memory.segment import SharedSegment
from tests.support.data_process import GROUP, MIB, Data, DataInThread, add_plan
from tests.support.gpu_stand_in import replace_cuda
from tests.unit.data.conftest import MakeMemory, MakePair

HOST, BLOCK_BYTES, NUM_SLOTS = "host", 16 << 10, 3
TURN = wire.Turn("turn")


def open_slots(data: Data, slot_bytes: int = MIB) -> wire.SlotsOpened:
    opened: wire.SlotsOpened = data.call(
        wire.OpenSlots(device=HOST, num_slots=NUM_SLOTS, slot_bytes=slot_bytes)
    )
    return opened


def tile(num_blocks: int) -> Tile:
    return Tile(GROUP, (0,), ("latent",), 0, 1, 0, num_blocks)


def test_a_tile_is_gathered_read_and_scattered_into_each_memory(
    make_pair: MakePair, memory: MakeMemory
) -> None:
    pair = make_pair(64, BLOCK_BYTES)
    reader, holder = pair.reader, pair.holder
    second = memory(64, BLOCK_BYTES)
    reader.add(2, second, direct=False)
    slots = open_slots(holder)
    open_slots(reader)
    blobs = holder.metadata(devices=[HOST])
    source, target = BlockTable.of([9, 3, 5]), BlockTable.of([0, 1, 40])

    gathered = holder.do(
        wire.GatherJob(memory=1, table=source, tile=tile(3), device=HOST, slot=2, turn=TURN)
    )
    reader.call(wire.AddPeer(peer="holder", metadata=blobs))
    read = reader.do(
        wire.ReadTile(
            peer="holder",
            address=slots.address + 2 * MIB,
            num_bytes=3 * BLOCK_BYTES,
            memory_kind=slots.memory_kind,
            remote_device=slots.nixl_device,
            device=HOST,
            slot=1,
        )
    )
    scattered = reader.do(
        wire.Scatter(memories=(1, 2), table=target, tile=tile(3), device=HOST, slot=1, turn=TURN)
    )

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
    flat, table = memory(8, BLOCK_BYTES, seed=1), BlockTable.of(range(8))
    before = flat.blocks.copy()
    one.add(1, flat, direct=False)
    open_slots(one)
    in_slot: dict[str, Any] = {
        "memory": 1,
        "tile": tile(8),
        "device": HOST,
        "slot": 0,
        "turn": TURN,
    }

    one.call(wire.GatherJob(table=table, **in_slot))
    one.call(wire.Zero(memory=1, group=GROUP, table=table, span=(2, 5), turn=TURN))
    zeroed = flat.blocks.copy()
    one.call(wire.Wipe(device=HOST, slot=0))
    scatter = wire.Scatter(memories=(1,), table=table, tile=tile(8), device=HOST, slot=0, turn=TURN)
    one.call(scatter)

    assert not zeroed[2:5].any()
    assert np.array_equal(zeroed[[0, 1, 5, 6, 7]], before[[0, 1, 5, 6, 7]])
    assert not flat.content.any()


def test_digests_of_equal_bytes_are_equal_and_of_others_not(one: Data, memory: MakeMemory) -> None:
    flats = [memory(64, BLOCK_BYTES, seed=seed) for seed in (1, 1, 1)]
    flats[2].content[17] ^= 1
    found = []
    for number, flat in enumerate(flats):
        one.add(number, flat, direct=False)
        digest = wire.DigestJob(
            memory=number,
            table=BlockTable.of(range(64)),
            tile=tile(64),
            offer_id="offer",
            one_in=1,
            turn=TURN,
        )
        found.append(np.frombuffer(one.call(digest).digests, "<u8"))

    assert np.array_equal(found[0], found[1])
    assert np.flatnonzero(found[0] != found[2]).tolist() == [0]
    assert len(found[0]) == 64 // 16


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS])
def test_a_slot_that_is_not_there_is_refused(one: Data, memory: MakeMemory, slot: int) -> None:
    one.add(1, memory(1, BLOCK_BYTES), direct=False)
    open_slots(one)
    gather = wire.GatherJob(
        memory=1, table=BlockTable.of([0]), tile=tile(1), device=HOST, slot=slot, turn=TURN
    )

    with pytest.raises(GeometryError, match=f"slot {slot} of 3 slots"):
        one.call(gather)


def test_unavailable_slots_and_jobs_naming_them_are_refused(one: Data) -> None:
    huge = wire.OpenSlots(device=HOST, num_slots=1 << 30, slot_bytes=1 << 30)

    with pytest.raises(SegmentError, match="does not fit"):
        one.call(huge)
    with pytest.raises(SegmentError, match="does not fit"):
        one.call(wire.Wipe(device=HOST, slot=0))
    with pytest.raises(SegmentError, match=r"CUDA|GPU|NVIDIA"):
        one.call(wire.OpenSlots(device="GPU-0", num_slots=1, slot_bytes=4096))
    assert open_slots(one).memory_kind == "DRAM"
    with pytest.raises(LocalError, match="slots host is defined already"):
        open_slots(one)
    (refused, *_) = logged(one)
    assert (refused.event, refused.fields["gpu"]) == ("staging.refused", "GPU-0")


def test_a_tile_larger_than_a_slot_is_not_read(make_pair: MakePair) -> None:
    pair = make_pair()
    open_slots(pair.reader, slot_bytes=4096)
    read = wire.ReadTile(
        peer="holder",
        address=1 << 20,
        num_bytes=4097,
        memory_kind="DRAM",
        remote_device=0,
        device=HOST,
        slot=0,
    )

    with pytest.raises(LocalError) as refused:
        pair.reader.call(read)

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


@pytest.mark.parametrize(("nic_reads_gpu", "refused"), [(True, ["VRAM"]), (False, [])])
def test_gpu_slots_are_pinned_unless_nic_and_nixl_take_vram(
    monkeypatch: pytest.MonkeyPatch, nic_reads_gpu: bool, refused: list[str]
) -> None:
    made: list[SharedSegment] = []

    def slots(size_bytes: int, _: int, *, pinned: bool) -> SharedSegment:
        made.append(SharedSegment(size_bytes))
        return made[-1]

    replace_cuda(monkeypatch, gpu_ordinal=lambda _: 3, GpuSlots=slots)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    asked = wire.OpenSlots(
        device="GPU-0", num_slots=NUM_SLOTS, slot_bytes=4096, nic_reads_gpu=nic_reads_gpu
    )
    data = DataInThread()
    try:
        data.call(wire.OpenNixl())
        opened = data.call(asked)
    finally:
        data.end()
        for one in made:
            one.close()

    assert (opened.memory_kind, opened.nixl_device) == ("DRAM", 0)
    assert [line.fields["memory"] for line in logged(data)] == refused


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
    assert ended.error
    assert ended.error.code is ErrorCode.CANCELLED
    assert ended.num_bytes == 0
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
    assert (ended.error is None) == (ended.num_bytes == 512 * MIB)
    if ended.error:
        assert ended.error.code is ErrorCode.CANCELLED
