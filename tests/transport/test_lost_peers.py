"""Peers that die and peers that stop: what the reader is told, and what it must not be told."""

import signal
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import pytest

from kvbus.errors import ErrorCode, LocalError, PeerLost, RemoteError
from kvbus.transport import Read, ReadOutcome, ReadStatus, TransportLimits
from tests.transport.conftest import MakeLink, Peer, Reader, StartPeer, content, until

MIB = 1 << 20


def test_a_peer_killed_mid_read_is_lost_and_another_is_still_readable(
    over_tcp: None, link: MakeLink, start_peer: StartPeer
) -> None:
    victim, reader, name, address = link(512 * MIB, peer="victim/1")
    other = start_peer("other/1")
    other_address, other_metadata = other.allocate(MIB, seed=2)
    other_name = reader.transport.add_peer(other_metadata).result(20)

    _, ended = reader.start(name, address, [(0, 0, 512 * MIB)])
    until(lambda: bool(reader.memory[:4096].any()))
    victim.signal(signal.SIGKILL)
    outcome = ended.result(20)
    after = reader.read(other_name, other_address, [(0, 0, MIB)])

    assert outcome.status is ReadStatus.FAILED
    assert isinstance(outcome.error, PeerLost)
    assert outcome.error.detail["nixl"] == "nixlRemoteDisconnectError"
    assert after.status is ReadStatus.DONE
    assert np.array_equal(reader.memory[:MIB], content(MIB, 2))
    assert reader.transport.stats().outstanding_handles == 0
    reader.transport.remove_peer(name).result(20)
    assert reader.transport.stats().peers == 1


class Stopped(NamedTuple):
    peer: Peer
    reader: Reader
    name: str
    read: Read
    ended: Future[ReadOutcome]


@pytest.fixture
def stopped(over_tcp: None, link: MakeLink) -> Stopped:
    """A reader with a read from a peer that was stopped while it answered."""
    limits = TransportLimits(slice_bytes=64 * MIB)
    peer, reader, name, address = link(256 * MIB, limits, seed=3, connected=True)
    peer.signal(signal.SIGSTOP)
    read, ended = reader.start(name, address, [(0, 0, 256 * MIB)])
    until(lambda: reader.transport.stats().outstanding_handles > 0)
    return Stopped(peer, reader, name, read, ended)


def test_a_stopped_peer_keeps_an_aborted_read_outstanding_until_it_goes_on(
    stopped: Stopped,
) -> None:
    peer, reader, _, read, ended = stopped
    transport = reader.transport

    read.abort()
    passes = transport.stats().progress_calls
    until(lambda: transport.stats().progress_calls > passes + 200)
    during = transport.stats()
    was_done = ended.done()
    peer.signal(signal.SIGCONT)
    outcome = ended.result(20)

    assert not was_done
    assert during.outstanding_reads == 1
    assert during.outstanding_handles >= 1
    assert during.outstanding_bytes >= 64 * MIB
    assert outcome.status is ReadStatus.ABORTED
    assert 0 < outcome.num_bytes < 256 * MIB
    assert transport.stats().outstanding_handles == 0


def test_nothing_is_taken_back_under_a_live_handle(stopped: Stopped) -> None:
    peer, reader, name, read, ended = stopped
    transport = reader.transport

    with pytest.raises(LocalError) as memory:
        transport.deregister(reader.registration).result(20)
    with pytest.raises(LocalError) as connection:
        transport.remove_peer(name).result(20)
    read.abort()
    peer.signal(signal.SIGCONT)
    ended.result(20)

    assert memory.value.code is connection.value.code is ErrorCode.BUSY
    transport.deregister(reader.registration).result(20)
    transport.remove_peer(name).result(20)


def test_a_stopped_peer_holds_up_nobody_else(stopped: Stopped, start_peer: StartPeer) -> None:
    _, reader, *_ = stopped
    other = start_peer("other/1")
    address, metadata = other.allocate(64 * MIB, seed=4)
    name = reader.transport.add_peer(metadata).result(20)

    outcomes = [reader.read(name, address, [(0, 0, 64 * MIB)]) for _ in range(5)]

    assert {outcome.status for outcome in outcomes} == {ReadStatus.DONE}


def test_close_reports_the_handle_that_a_stopped_peer_holds(stopped: Stopped) -> None:
    _, reader, _, _, ended = stopped

    report = reader.transport.close(timeout_s=0.2).result(20)

    assert report.num_handles >= 1
    assert report.num_registrations == 1
    assert not ended.done()
    assert reader.transport.stats().outstanding_handles == report.num_handles


def without_key(metadata: bytes) -> bytes:
    """Metadata of one region without UCX's key to it: all in order, and NIXL refuses it."""
    at = metadata.index(b"|n\x08" + 7 * b"\0") + 19  # behind the number of descriptors
    return metadata[:at] + (24).to_bytes(8, "little") + metadata[at + 8 : at + 32] + b"|"


def test_a_handle_that_nixl_forgot_is_never_reported_as_ended(stopped: Stopped) -> None:
    peer, reader, _, _, ended = stopped

    with pytest.raises(RemoteError):  # NIXL forgets a known peer when it refuses its metadata
        reader.transport.add_peer(without_key(reader.peer_metadata)).result(20)
    until(lambda: reader.transport.stats().unreleased_handles > 0)
    peer.signal(signal.SIGCONT)
    with pytest.raises(LocalError) as memory:
        reader.transport.deregister(reader.registration).result(20)

    assert memory.value.code is ErrorCode.BUSY
    assert not ended.done()
    assert reader.transport.stats().outstanding_reads == 1
