"""Jobs of data processes, by their channel: READs between two of them, and copies in one."""

import pytest

from kvbus.data import messages as wire
from kvbus.errors import ErrorCode
from tests.support.data_process import Data, add_plan, moves
from tests.unit.data.conftest import MakeMemory, MakePair, Start, code_of

BLOCK_BYTES, NUM_BLOCKS = 16 << 10, 256


def test_requests_wait_for_objects(start: Start, make_pair: MakePair, memory: MakeMemory) -> None:
    held = make_pair().held
    reader, ours = start("late"), memory(NUM_BLOCKS, BLOCK_BYTES)
    numbers = [
        reader.send(wire.OpenNixl()),
        reader.send(ours.added(1), [ours.fd]),
        reader.send(wire.AddPeer(peer="holder", metadata=held.metadata)),
        reader.send(held.remote(2)),
        reader.send(add_plan(3, 2, 1)),
        reader.read(3, [9, 4, 200], [7, 8, 0]),
    ]

    replies = [reader.wait(number) for number in numbers]

    assert not any(reply.error for reply in replies)
    assert replies[-1].num_bytes == 3 * BLOCK_BYTES
    assert (ours.blocks[[7, 8, 0]] == held.flat.blocks[[9, 4, 200]]).all()
    assert not ours.blocks[1:7].any()
    assert not ours.blocks[9:].any()


@pytest.mark.parametrize("num_blocks", [1, NUM_BLOCKS])
def test_a_copy_brings_blocks_of_tables(one: Data, memory: MakeMemory, num_blocks: int) -> None:
    source, target = memory(NUM_BLOCKS, BLOCK_BYTES, seed=1), memory(NUM_BLOCKS, BLOCK_BYTES)
    blocks = range(num_blocks), range(NUM_BLOCKS - num_blocks, NUM_BLOCKS)
    one.stop()
    one.send(source.added(1, direct=False, borrowed=True), [source.fd])
    one.send(target.added(2, direct=False), [target.fd])
    one.send(add_plan(3, 1, 2))
    number = one.copy(3, *blocks)
    one.go_on()  # it finds all of them
    reply = one.wait(number)
    assert (reply.error, reply.num_bytes) == (None, num_blocks * BLOCK_BYTES)
    assert (target.blocks[NUM_BLOCKS - num_blocks :] == source.blocks[:num_blocks]).all()


def test_jobs_fail_with_error_of_named_objects_or_as_defect(one: Data, memory: MakeMemory) -> None:
    flat = memory(2, BLOCK_BYTES)
    wrong = memory(1, BLOCK_BYTES).added(1, direct=False)
    copy = wire.Copy(plan=3, turn=wire.Turn("a"), **moves([0], [0]))
    numbers = [
        one.send(wrong, [flat.fd]),
        one.send(flat.added(2, direct=False), [flat.fd]),
        one.send(add_plan(3, 1, 2)),
        one.send(copy),
    ]

    errors = [one.wait(number).error for number in numbers]

    assert errors[0]
    assert errors[0].code is ErrorCode.SEGMENT
    assert errors[1] is None
    assert errors[2] == errors[3] == errors[0]
    assert code_of(one.do(wire.Copy(plan=9, turn=wire.Turn("a"), **moves([0], [0])))) == "internal"
