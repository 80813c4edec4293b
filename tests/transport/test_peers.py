"""Registrations that come and go while peers know each other."""

import signal

import numpy as np
import pytest

from kvbus.errors import RemoteError
from kvbus.transport import ReadStatus
from tests.transport.conftest import MakeLink, StartPeer, StartReader, content

MIB = 1 << 20


def test_memory_registered_later_is_readable_once_its_metadata_is_added(
    start_peer: StartPeer, start_reader: StartReader
) -> None:
    peer, reader = start_peer("peer/1"), start_reader()
    _, metadata = peer.allocate(MIB, seed=1)
    reader.allocate(MIB)
    name = reader.transport.add_peer(metadata).result(20)
    address, later = peer.allocate(MIB, seed=2)

    before = reader.read(name, address, [(0, 0, MIB)])
    same_name = reader.transport.add_peer(later).result(20)
    after = reader.read(name, address, [(0, 0, MIB)])

    assert same_name == name == "peer/1"
    assert before.status is ReadStatus.FAILED
    assert after.status is ReadStatus.DONE
    assert np.array_equal(reader.memory, content(MIB, 2))


def test_metadata_may_be_added_while_a_read_is_in_flight(
    over_tcp: None, start_peer: StartPeer, start_reader: StartReader
) -> None:
    peer, reader = start_peer("peer/1"), start_reader()
    address, metadata = peer.allocate(128 * MIB, seed=3)
    later_address, later = peer.allocate(MIB, seed=4)
    reader.allocate(129 * MIB)
    name = reader.transport.add_peer(metadata).result(20)
    reader.read(name, address, [(0, 0, 4096)])  # connected

    peer.signal(signal.SIGSTOP)
    _, ended = reader.start(name, address, [(0, 0, 128 * MIB)])
    reader.transport.add_peer(later).result(20)
    in_flight = not ended.done()
    peer.signal(signal.SIGCONT)
    small = reader.read(name, later_address, [(128 * MIB, 0, MIB)])

    assert in_flight
    assert small.status is ended.result(20).status is ReadStatus.DONE
    assert np.array_equal(reader.memory[: 128 * MIB], content(128 * MIB, 3))
    assert np.array_equal(reader.memory[128 * MIB :], content(MIB, 4))


def test_the_same_address_registered_again_is_readable_again(link: MakeLink) -> None:
    peer, reader, name, address = link(MIB, seed=5)
    assert reader.read(name, address, [(0, 0, MIB)]).status is ReadStatus.DONE

    again = bytes.fromhex(peer.ask("refill", index=0, seed=6)["metadata"])
    reader.transport.add_peer(again).result(20)
    outcome = reader.read(name, address, [(0, 0, MIB)])

    assert outcome.status is ReadStatus.DONE
    assert np.array_equal(reader.memory, content(MIB, 6))


def test_a_removed_peer_can_be_added_again(
    start_peer: StartPeer, start_reader: StartReader
) -> None:
    peer, reader = start_peer("peer/1"), start_reader()
    address, _ = peer.allocate(MIB, seed=7)
    metadata = bytes.fromhex(peer.ask("everything")["metadata"])
    reader.allocate(MIB)
    name = reader.transport.add_peer(metadata).result(20)

    reader.transport.remove_peer(name).result(20)
    unknown = reader.read(name, address, [(0, 0, MIB)])
    reader.transport.add_peer(metadata).result(20)
    known = reader.read(name, address, [(0, 0, MIB)])

    assert unknown.status is ReadStatus.FAILED
    assert known.status is ReadStatus.DONE


@pytest.mark.parametrize("garbage", [b"", b"nixl", b"\xff" * 400])
def test_garbage_instead_of_metadata_is_refused_and_harms_nobody(
    link: MakeLink, garbage: bytes
) -> None:
    _, reader, name, address = link(MIB, seed=8)

    with pytest.raises(RemoteError):
        reader.transport.add_peer(garbage).result(20)

    assert reader.read(name, address, [(0, 0, MIB)]).status is ReadStatus.DONE
