"""Memory of engines: many segments, truncated files, and what is left when it is removed."""

import os
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from kvbus.data import messages as wire
from kvbus.errors import ErrorCode, LocalError, SegmentError
from kvbus.geometry import Segment
from tests.support.data_process import MIB, Data, add_plan
from tests.unit.data.conftest import MakeMemory, MakePair, code_of

BLOCK_BYTES = 64 << 10
MAX_SEGMENTS = 4096


@pytest.mark.parametrize("num_blocks", [1, 256], ids=["on the main thread", "in a thread"])
def test_copy_of_cut_memory_fails_once(one: Data, memory: MakeMemory, num_blocks: int) -> None:
    source = memory(256, BLOCK_BYTES, seed=1, sealed=False)
    target = memory(256, BLOCK_BYTES)
    one.add(1, source, direct=False, borrowed=True)
    one.add(2, target, direct=False)
    one.call(add_plan(3, 1, 2))
    blocks = range(num_blocks)
    one.result(one.copy(3, blocks, blocks))
    arrived = np.array_equal(target.blocks[blocks], source.blocks[blocks])

    os.ftruncate(source.fd, 0)
    codes = {code_of(one.wait(one.copy(3, blocks, blocks))) for _ in range(2)}

    assert arrived
    assert codes == {ErrorCode.TRANSFER_FAILED}
    assert one.notices == [wire.Cut(1, "kv")]
    assert one.call(wire.Barrier()) is None


def test_a_holder_whose_memory_is_truncated_lives_and_reports_it(make_pair: MakePair) -> None:
    """Over TCP the holder's process touches its memory itself."""
    pair = make_pair(256, BLOCK_BYTES, tls="tcp", sealed=False)
    assert pair.can_read()
    os.ftruncate(pair.theirs.fd, 0)
    pair.reader.wait(pair.read_all())
    pair.holder.call(wire.Barrier())
    assert pair.holder.notices.count(wire.Cut(1, "kv")) == 1


def test_discarded_memory_is_zeros_and_not_copied(make_pair: MakePair, memory: MakeMemory) -> None:
    pair = make_pair(256, BLOCK_BYTES, tls="tcp")
    holder = pair.holder
    holder.add(2, memory(256, BLOCK_BYTES), direct=False)
    holder.call(add_plan(3, 1, 2))
    holder.result(holder.copy(3, [0], [0]))
    assert pair.can_read()

    holder.call(wire.DiscardMemory(memory=1))
    copied = holder.wait(holder.copy(3, [0], [0]))
    pair.ours.content[:] = 1
    pair.reader.result(pair.reader.read(1, [0], [0]))

    assert code_of(copied) is ErrorCode.TRANSFER_FAILED
    assert not pair.ours.blocks[0].any()
    assert pair.theirs.content.any(), "the engine has its own mapping"


def test_removed_memory_stays_mapped_for_readers(make_pair: MakePair, memory: MakeMemory) -> None:
    pair = make_pair(256, BLOCK_BYTES)
    holder, (address,) = pair.holder, pair.held.addresses.values()
    removed = holder.send(wire.RemoveMemory(memory=1))
    again = holder.hold(1, memory(4, BLOCK_BYTES, seed=3))
    holder.result(removed)
    pair.reader.meet(again, 2, 1)
    pair.reader.result(pair.reader.read(2, [3], [0]))
    assert is_mapped(holder, address)
    assert np.array_equal(pair.ours.blocks[0], again.flat.blocks[3])


def is_mapped(data: Data, address: int) -> bool:
    maps = Path(f"/proc/{data.process.pid}/maps").read_text()
    spans = (line.split()[0].split("-") for line in maps.splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in spans)


def test_memory_that_is_not_registered_goes_with_its_removal(one: Data, memory: MakeMemory) -> None:
    (address,) = one.add(1, memory(64, MIB), direct=False).values()
    was_mapped = is_mapped(one, address)
    one.call(wire.RemoveMemory(memory=1))
    one.call(wire.RemoveMemory(memory=1))
    assert was_mapped
    one.until(lambda: not is_mapped(one, address))


def test_thousands_of_segments_come_with_one_message(one: Data, memory: MakeMemory) -> None:
    flat = memory(1, 4096)
    names = ["kv", *(f"kv{number}" for number in range(1, MAX_SEGMENTS))]
    segments = tuple(Segment(name, 4096) for name in names)
    rank = structs.replace(flat.rank, segments=segments)
    parts = tuple(wire.SegmentPart(name, 4096) for name in names)
    added = structs.replace(flat.added(1, direct=False), rank=rank, segments=parts)
    addresses = one.call(added, [flat.segment.fd] * MAX_SEGMENTS).addresses
    one.call(wire.RemoveMemory(memory=1))
    assert len(set(addresses.values())) == MAX_SEGMENTS
    assert num_files(one) < 32


def num_files(data: Data) -> int:
    return len(list(Path(f"/proc/{data.process.pid}/fd").iterdir()))


def test_memory_that_cannot_be_mapped_leaves_no_descriptor(one: Data, memory: MakeMemory) -> None:
    flat = memory(1, 4096)
    before = num_files(one)
    wrong = wire.SegmentPart("wrong", 8192)
    added = structs.replace(flat.added(1), segments=(wrong, *flat.added(1).segments))
    with pytest.raises(SegmentError, match="8192 were claimed"):
        one.call(added, [flat.segment.fd] * 2)
    one.add(1, flat, direct=False)
    with pytest.raises(LocalError, match="memory 1 is defined already"):
        one.call(flat.added(1), [flat.segment.fd])
    assert num_files(one) == before


def test_long_tables_come_in_many_frames(one: Data, memory: MakeMemory) -> None:
    num_blocks = 200_000
    source, target = memory(num_blocks, 1, seed=1), memory(num_blocks, 1)
    one.add(1, source, direct=False)
    one.add(2, target, direct=False)
    one.call(add_plan(3, 1, 2))
    order = np.random.default_rng(5).permutation(num_blocks)

    one.result(one.copy(3, range(num_blocks), order.tolist()))

    assert np.array_equal(target.content[order], source.content)
