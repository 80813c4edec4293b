"""Peers that die and peers that stop: what the reader is told, and what it must not be told."""

from concurrent.futures import Future
from typing import NamedTuple

import pytest

from kvbus.errors import ErrorCode, LocalError, PeerLost, RemoteError
from kvbus.transport import Read, ReadOutcome, ReadStatus, TransportLimits
from tests.transport.conftest import MIB, WITHIN_S, Meet, Place, Reader, until


class Stopped(NamedTuple):
    """A read of 256 MiB of a peer that was stopped while it answered; 4 MiB behind are free."""

    reader: Reader
    place: Place
    read: Read
    ended: Future[ReadOutcome]


@pytest.fixture
def stopped(over_tcp: None, meet: Meet) -> Stopped:
    limits = TransportLimits(slice_bytes=64 * MIB)
    reader, place = meet(256 * MIB, limits, room=260 * MIB, connected=True)
    reader.memory[:] = 0
    place.peer.stop()
    begun = reader.start(place)
    until(lambda: reader.transport.stats().outstanding_handles > 0)
    return Stopped(reader, place, *begun)


def test_a_stopped_peer_keeps_its_read_outstanding_and_holds_up_nobody_else(
    stopped: Stopped,
) -> None:
    reader, place, read, ended = stopped
    transport = reader.transport
    other = reader.meet("other-1", 4 * MIB, seed=4)

    of_others = [reader.read(other, (256 * MIB, 0, 4 * MIB)) for _ in range(5)]
    with pytest.raises(LocalError) as memory:
        transport.deregister(reader.registration).result(WITHIN_S)
    with pytest.raises(LocalError) as connection:
        transport.remove_peer(place.name).result(WITHIN_S)
    read.abort()
    passes = transport.stats().progress_calls
    until(lambda: transport.stats().progress_calls > passes + 200)
    during, was_done = transport.stats(), ended.done()
    place.peer.go_on()
    outcome, at_end = ended.result(WITHIN_S), reader.memory.copy()
    again = reader.read(place, (0, 0, MIB))

    assert {outcome.status for outcome in of_others} == {ReadStatus.DONE}
    assert memory.value.code is connection.value.code is ErrorCode.BUSY
    assert not was_done
    assert during.outstanding_reads == 1
    assert during.outstanding_handles >= 1
    assert during.outstanding_bytes >= 64 * MIB
    assert outcome.status is ReadStatus.ABORTED
    assert 0 < outcome.num_bytes < 256 * MIB
    assert not at_end[outcome.num_bytes : 256 * MIB].any()
    assert again.status is ReadStatus.DONE
    assert (reader.memory[MIB:] == at_end[MIB:]).all(), "nothing lands once it has ended"
    assert transport.stats().outstanding_handles == 0
    transport.deregister(reader.registration).result(WITHIN_S)
    transport.remove_peer(place.name).result(WITHIN_S)


def test_a_peer_killed_mid_read_is_lost_and_another_is_still_readable(stopped: Stopped) -> None:
    reader, victim, _, ended = stopped
    other = reader.meet("other-1", seed=2)

    victim.peer.end()
    outcome = ended.result(WITHIN_S)

    assert outcome.status is ReadStatus.FAILED
    assert isinstance(outcome.error, PeerLost)
    assert outcome.error.detail["nixl"] == "nixlRemoteDisconnectError"
    assert reader.can_read(other)
    assert reader.transport.stats().outstanding_handles == 0
    reader.transport.remove_peer(victim.name).result(WITHIN_S)
    assert reader.transport.stats().peers == 1


def test_close_reports_the_handle_that_a_stopped_peer_holds(stopped: Stopped) -> None:
    transport = stopped.reader.transport

    registered_bytes = transport.stats().registered_bytes
    num_handles = transport.close(timeout_s=0.2).result(WITHIN_S)

    assert num_handles >= 1
    assert transport.stats().registered_bytes == registered_bytes > 0
    assert not stopped.ended.done()
    assert transport.stats().outstanding_handles == num_handles


def without_key(metadata: bytes) -> bytes:
    """Metadata of one region without UCX's key to it: all in order, and NIXL refuses it."""
    at = metadata.index(b"|n\x08" + 7 * b"\0") + 19  # behind the number of descriptors
    return metadata[:at] + (24).to_bytes(8, "little") + metadata[at + 8 : at + 32] + b"|"


def test_a_handle_that_nixl_forgot_is_never_reported_as_ended(stopped: Stopped) -> None:
    reader, place, _, ended = stopped
    transport = reader.transport

    with pytest.raises(RemoteError):  # NIXL forgets a known peer when it refuses its metadata
        transport.add_peer(without_key(place.metadata)).result(WITHIN_S)
    until(lambda: transport.stats().unreleased_handles > 0)
    place.peer.go_on()
    with pytest.raises(LocalError) as memory:
        transport.deregister(reader.registration).result(WITHIN_S)

    assert memory.value.code is ErrorCode.BUSY
    assert not ended.done()
    assert transport.stats().outstanding_reads == 1
