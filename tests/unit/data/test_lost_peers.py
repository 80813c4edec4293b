"""Peers that stop, die, or are forgotten: what a READ reports, and what it must not report."""

import numpy as np
import pytest

from kvbus.data import messages as wire
from kvbus.errors import ErrorCode, LocalError, PeerLost, RemoteError
from tests.support.data_process import MIB
from tests.unit.data.conftest import MakeMemory, MakePair, Pair, code_of

SLICE_BLOCKS, NUM_BLOCKS = 64, 256
PINGS = 200
"""Of more than are answered between two steps of READs: a step follows what came before them."""


@pytest.fixture
def stopped(make_pair: MakePair) -> tuple[Pair, int]:
    """A pair whose holder was stopped, and a READ of 256 MiB that has begun since."""
    pair = make_pair(NUM_BLOCKS + 4, MIB, tls="tcp", slice_bytes=SLICE_BLOCKS * MIB)
    assert pair.can_read()
    pair.ours.content[:] = 0
    pair.holder.stop()
    number = pair.reader.read(1, range(NUM_BLOCKS), range(NUM_BLOCKS))
    for _ in range(PINGS):
        pair.reader.call(wire.Barrier())  # so it is posted
    return pair, number


def test_stopped_peer_delays_no_other_job(stopped: tuple[Pair, int], memory: MakeMemory) -> None:
    pair, number = stopped
    reader = pair.reader
    _, held = pair.add_holder("other", memory(4, MIB, seed=4))
    reader.meet(held, 2, 1)

    behind = range(NUM_BLOCKS, NUM_BLOCKS + 4)
    for _ in range(5):
        reader.result(reader.read(2, range(4), behind))
    with pytest.raises(LocalError) as memory_back:
        reader.call(wire.RemoveMemory(memory=1))
    removal = reader.send(wire.RemovePeer(peer="holder"))
    reader.call(wire.AbortJob(job=number))
    for _ in range(PINGS):
        reader.call(wire.Barrier())
    was_over = reader.has_ended(number), reader.has_ended(removal)
    pair.holder.go_on()
    reply = reader.wait(number)
    at_end = pair.ours.content.copy()
    reader.result(removal)
    reader.call(wire.AddPeer(peer="holder", metadata=pair.held.metadata))
    reader.result(reader.read(1, [0], [0]))

    assert memory_back.value.code is ErrorCode.BUSY
    assert was_over == (False, False)
    assert code_of(reply) is ErrorCode.CANCELLED
    assert 0 < reply.num_bytes < NUM_BLOCKS * MIB
    assert not at_end[reply.num_bytes : NUM_BLOCKS * MIB].any()
    assert np.array_equal(pair.ours.content[MIB:], at_end[MIB:]), "nothing lands after its end"
    assert np.array_equal(pair.ours.blocks[behind], held.flat.blocks)
    reader.call(wire.RemoveMemory(memory=1))


def test_peer_killed_during_read_is_lost(stopped: tuple[Pair, int], memory: MakeMemory) -> None:
    pair, number = stopped
    reader = pair.reader
    _, held = pair.add_holder("other", memory(4, MIB, seed=2))
    pair.holder.end()
    with pytest.raises(PeerLost) as lost:
        reader.result(number)
    reader.meet(held, 2, 1)
    reader.result(reader.read(2, [1], [1]))
    reader.call(wire.RemovePeer(peer="holder"))
    assert lost.value.detail["nixl"] == "nixlRemoteDisconnectError"
    assert np.array_equal(pair.ours.blocks[1], held.flat.blocks[1])


def without_key(metadata: bytes) -> bytes:
    """Metadata of one region without UCX's key to it: all in order, and NIXL refuses it."""
    at = metadata.index(b"|n\x08" + 7 * b"\0") + 19  # behind the number of descriptors
    return metadata[:at] + (24).to_bytes(8, "little") + metadata[at + 8 : at + 32] + b"|"


def test_a_handle_that_nixl_forgot_is_never_reported_as_ended(stopped: tuple[Pair, int]) -> None:
    pair, number = stopped
    reader = pair.reader
    (blob,) = pair.held.metadata
    with pytest.raises(RemoteError):  # NIXL forgets a known peer when it refuses its metadata
        reader.call(wire.AddPeer(peer="holder", metadata=(without_key(blob),)))
    pair.holder.go_on()
    for _ in range(PINGS):
        reader.call(wire.Barrier())
    with pytest.raises(LocalError, match="a handle still writes") as memory_back:
        reader.call(wire.RemoveMemory(memory=1))
    assert memory_back.value.code is ErrorCode.BUSY
    assert not reader.has_ended(number)


def test_progress_is_driven_on_demand_only(make_pair: MakePair) -> None:
    """Over TCP a holder that drives no progress serves nothing."""
    pair = make_pair(tls="tcp")
    assert pair.can_read()
    pair.holder.call(wire.DriveProgress(on=False))
    idle_s = pair.holder.cpu_s()

    number = pair.reader.read(1, [7], [7])
    for _ in range(300):
        pair.reader.call(wire.Barrier())
    was_over, idle_s = pair.reader.has_ended(number), pair.holder.cpu_s() - idle_s
    pair.holder.call(wire.DriveProgress(on=True))

    assert pair.reader.result(number) is None
    assert not was_over
    assert idle_s < 0.05


def test_peer_added_again_after_broken_connections_is_readable(
    make_pair: MakePair,
) -> None:
    pair = make_pair()
    assert pair.can_read()

    numbers = [
        pair.reader.send(wire.RemovePeer(peer="holder")),
        pair.reader.send(wire.AddPeer(peer="holder", metadata=pair.held.metadata)),
        pair.reader.read(1, [9], [9]),
    ]

    assert not any(pair.reader.wait(number).error for number in numbers)
    assert np.array_equal(pair.ours.blocks[9], pair.theirs.blocks[9])
