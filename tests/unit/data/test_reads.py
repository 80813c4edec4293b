"""READs between two data processes: what arrives, in which turn, and what an abort leaves."""

import numpy as np
import pytest

from kvbus.data import messages as wire
from kvbus.errors import ErrorCode, LocalError, PeerLost, TransferFailed
from tests.support.data_process import MIB, add_plan, moves
from tests.unit.data.conftest import MakeMemory, MakePair, Start, code_of, opened


@pytest.mark.parametrize(("tls", "slice_bytes"), [("all", 64 << 10), ("tcp", 5056)])
def test_scattered_blocks_land_in_places(make_pair: MakePair, tls: str, slice_bytes: int) -> None:
    pair = make_pair(1 << 14, 64, tls=tls, slice_bytes=slice_bytes)
    rng = np.random.default_rng(2)
    source, target = (rng.permutation(1 << 14)[:5000].tolist() for _ in range(2))
    expected = np.zeros_like(pair.ours.blocks)
    expected[target] = pair.theirs.blocks[source]
    reply = pair.reader.do(wire.Read(plan=1, **moves(source, target)))
    assert (reply.error, reply.num_bytes) == (None, 5000 * 64)
    assert np.array_equal(pair.ours.blocks, expected)


@pytest.mark.parametrize(("num_blocks", "priority"), [(1, 0), (1024, 1)], ids=["small", "urgent"])
def test_urgent_read_overtakes(make_pair: MakePair, num_blocks: int, priority: int) -> None:
    """All other turns are in `tests/unit/table/test_fair.py`."""
    pair = make_pair(2048, 32 << 10, slice_bytes=256 << 10)
    reader = pair.reader
    assert pair.can_read()
    reader.stop()
    large = reader.read(1, range(1024, 2048), range(1024, 2048))
    other = reader.read(1, range(num_blocks), range(num_blocks), priority=priority)
    reader.go_on()
    reader.wait(other)
    assert large not in reader.replies
    assert reader.result(large) is None


@pytest.mark.parametrize("tls", ["all", "tcp"])
def test_connected_reads_over_shared_memory_end_undriven(make_pair: MakePair, tls: str) -> None:
    pair = make_pair(tls=tls)
    reader = pair.reader
    replies = [reader.wait(reader.read(1, [at], [at])) for at in range(8)]
    assert not any(reply.error for reply in replies)
    first, *others = (reply.undriven for reply in replies)
    assert not first
    assert all(others) == (tls == "all")  # over TCP, a peer may be faster than one look


def test_wrong_reads_and_peers_fail_alone(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.reader.call(pair.held.remote(7, offset_bytes=1 << 40))
    pair.reader.call(add_plan(7, 7, 1))
    with pytest.raises(TransferFailed) as not_registered:
        pair.reader.result(pair.reader.read(7, [0], [0]))
    assert not_registered.value.detail["nixl"] == "nixlNotFoundError"
    with pytest.raises(LocalError, match="'holder' came as that of 'other'"):
        pair.reader.call(wire.AddPeer(peer="other", metadata=pair.held.metadata))
    lacking = {**moves([0, 1], [0, 1]), "spans": {"flat": (0, 3)}}
    assert code_of(pair.reader.do(wire.Read(plan=1, **lacking))) is ErrorCode.GEOMETRY
    assert pair.can_read()


def test_memory_is_readable_once_peer_is_added(make_pair: MakePair, memory: MakeMemory) -> None:
    pair = make_pair()
    reader, holder = pair.reader, pair.holder
    later = holder.hold(2, memory(256, 16 << 10, seed=2))
    reader.call(later.remote(2))
    reader.call(add_plan(2, 2, 1))

    early = reader.wait(reader.read(2, [1], [1]))
    reader.call(wire.AddPeer(peer="holder", metadata=later.metadata))
    reader.result(reader.read(2, [1], [1]))
    reader.call(wire.RemovePeer(peer="holder"))
    removed = reader.wait(reader.read(2, [1], [1]))
    reader.call(wire.AddPeer(peer="holder", metadata=holder.metadata(1, 2)))

    assert code_of(early) is ErrorCode.TRANSFER_FAILED
    assert np.array_equal(pair.ours.blocks[1], later.flat.blocks[1])
    assert code_of(removed) is ErrorCode.PEER_LOST
    assert pair.can_read()


def test_metadata_may_be_added_during_a_read(make_pair: MakePair, memory: MakeMemory) -> None:
    pair = make_pair(128, MIB, tls="tcp")
    later = pair.holder.hold(2, memory(16, MIB, seed=2))
    number = pair.read_of_stopped()
    pair.reader.meet(later, 2, 1)
    in_flight = not pair.reader.has_ended(number)
    pair.holder.go_on()
    pair.reader.result(number)
    arrived = np.array_equal(pair.ours.content, pair.theirs.content)
    pair.reader.result(pair.reader.read(2, [3], [3]))
    assert in_flight
    assert arrived
    assert np.array_equal(pair.ours.blocks[3], later.flat.blocks[3])


def test_memory_is_registered_once_nixl_opens(start: Start, memory: MakeMemory) -> None:
    holder, reader = opened(start("holder")), start("reader")
    theirs, ours = memory(4, 4096, seed=1), memory(4, 4096)
    held = holder.hold(1, theirs)
    reader.add(1, ours)
    with pytest.raises(LocalError, match="nixl is not defined"):
        reader.call(wire.AddPeer(peer="holder", metadata=held.metadata))
    assert reader.call(wire.ListListening()).sockets == ()
    reader.call(wire.OpenNixl())
    assert {host for host, _ in reader.call(wire.ListListening()).sockets} == {"127.0.0.1"}
    reader.meet(held, 1, 1)
    reader.result(reader.read(1, [2], [0]))
    assert np.array_equal(ours.blocks[0], theirs.blocks[2])


def test_read_unpostable_by_ucx_names_settings_of_environment(make_pair: MakePair) -> None:
    pair = make_pair(env={"UCX_PROTO_ENABLE": "n"})
    with pytest.raises((TransferFailed, PeerLost)) as failed:
        pair.reader.result(pair.reader.read(1, [0], [0]))
    assert "UCX_PROTO_ENABLE=n" in failed.value.message


def test_opened_nixl_has_tcp_sockets_on_its_interfaces_alone(
    start: Start,
) -> None:
    data = start()
    before = data.call(wire.ListListening()).sockets
    data.call(wire.OpenNixl())
    after = data.call(wire.ListListening()).sockets

    assert before == ()
    assert {host for host, _ in after} == {"127.0.0.1"}
