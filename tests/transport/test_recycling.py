"""A NIXL agent that is made anew: what could never end has ended, and nothing of it lands."""

import gc
import resource
import signal
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvbus.errors import ErrorCode, TransferFailed
from kvbus.transport import Read, ReadOutcome, ReadStatus, TransportLimits
from kvbus.transport.recycling import AgentRecycler
from tests.transport.conftest import Bytes, MakeLink, Peer, Reader, StartPeer, content, until

MIB = 1 << 20
LONG = 64 * MIB
"""More than the sockets, or the queues in shared memory, between two processes hold."""
CANARY = 0xA5
ONE_POST = TransportLimits(slice_bytes=LONG)
WITHOUT_CMA = {"tcp": "tcp", "shared memory": "^cma"}
"""With CMA this process reads the other's memory itself: nothing waits for a peer."""


@dataclass
class Stuck:
    """A reader, and what it reads into the first `LONG` bytes from a peer that was stopped.

    Behind those is room for what it reads later.
    """

    peer: Peer
    reader: Reader
    name: str
    address: int
    read: Read
    ended: Future[ReadOutcome]

    def read_behind(self, name: str, address: int) -> tuple[Any, Future[ReadOutcome]]:
        return self.reader.start(name, address, [(LONG, 0, LONG)])

    @property
    def behind(self) -> Bytes:
        return self.reader.memory[LONG:]


def code_of(outcome: ReadOutcome) -> ErrorCode | None:
    return outcome.error.code if outcome.error else None


GetStuck = Callable[..., Stuck]


@pytest.fixture(params=["tcp", "shared memory"])
def fabric(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX reads its environment when an agent is made: both sides see it."""
    monkeypatch.setenv("UCX_TLS", WITHOUT_CMA[request.param])


@pytest.fixture
def get_stuck(link: MakeLink) -> GetStuck:
    def get(when: str = "before its answer", **options: Any) -> Stuck:
        peer, reader, name, address = link(
            LONG, ONE_POST, seed=3, room=2 * LONG, connected=True, **options
        )
        while True:
            began = begin(peer, reader, (name, address), is_early=when == "before its answer")
            stuck = Stuck(peer, reader, name, address, *began)
            if not stuck.ended.done():
                return stuck
            peer.signal(signal.SIGCONT)

    def begin(
        peer: Peer, reader: Reader, at: tuple[str, int], *, is_early: bool
    ) -> tuple[Read, Future[ReadOutcome]]:
        """A read during which the peer is stopped; it may have ended before."""
        transport = reader.transport
        reader.memory[:] = 0
        if is_early:
            peer.signal(signal.SIGSTOP)
        read, ended = reader.start(*at, [(0, 0, LONG)])
        if not is_early:
            until(lambda: bool(reader.memory[:4096].any()))
            peer.signal(signal.SIGSTOP)
        until(lambda: ended.done() or transport.stats().outstanding_handles > 0)
        passes = transport.stats().progress_calls
        until(lambda: ended.done() or transport.stats().progress_calls > passes + 50)
        return read, ended

    return get


@pytest.mark.usefixtures("fabric")
@pytest.mark.parametrize("when", ["before its answer", "within its answer"])
@pytest.mark.parametrize("nic_writes", [False, True], ids=["kept", "destroyed"])
def test_nothing_of_a_recycled_read_lands_when_its_peer_goes_on(
    get_stuck: GetStuck, start_peer: StartPeer, when: str, nic_writes: bool
) -> None:
    stuck = get_stuck(when, nic_writes=nic_writes)
    reader, transport = stuck.reader, stuck.reader.transport
    other = start_peer("other/1")
    other_address, metadata = other.allocate(LONG, seed=4)
    other_name = transport.add_peer(metadata).result(20)

    stuck.read.abort()
    report = transport.recycle(grace_s=0.2).result(20)
    outcome = stuck.ended.result(20)
    reader.memory[:] = CANARY
    stuck.peer.signal(signal.SIGCONT)
    if not nic_writes:  # UCX aborts the peer of one that was destroyed
        _, again = stuck.read_behind(stuck.name, stuck.address)
        assert again.result(20).status is ReadStatus.DONE
        assert np.array_equal(stuck.behind, content(LONG, 3))
    _, elsewhere = stuck.read_behind(other_name, other_address)

    assert elsewhere.result(20).status is ReadStatus.DONE
    assert np.array_equal(stuck.behind, content(LONG, 4))
    assert outcome.status is ReadStatus.ABORTED
    assert report.num_handles == 1
    assert (reader.memory[:LONG] == CANARY).all()
    assert stuck.peer.process.poll() is None or nic_writes
    stats = transport.stats()
    assert (stats.outstanding_handles, stats.retired_agents) == (0, 1)


def test_what_waits_goes_on_and_what_does_not_end_in_time_fails(
    over_tcp: None, get_stuck: GetStuck, start_peer: StartPeer
) -> None:
    stuck = get_stuck()
    transport = stuck.reader.transport
    other = start_peer("other/1")
    address, metadata = other.allocate(LONG, seed=4)
    name = transport.add_peer(metadata).result(20)

    recycled = transport.recycle(grace_s=0.5)
    _, waiting = stuck.read_behind(name, address)
    recycled.result(20)

    assert stuck.ended.result(20).status is ReadStatus.FAILED
    assert code_of(stuck.ended.result(20)) is ErrorCode.TRANSFER_FAILED
    assert waiting.result(20).status is ReadStatus.DONE
    assert np.array_equal(stuck.behind, content(LONG, 4))


def test_a_posted_read_of_another_peer_ends_before_the_agent_is_made_anew(
    over_tcp: None, get_stuck: GetStuck, start_peer: StartPeer
) -> None:
    stuck = get_stuck()
    transport = stuck.reader.transport
    other = start_peer("other/1")
    address, metadata = other.allocate(LONG, seed=4)
    name = transport.add_peer(metadata).result(20)
    assert stuck.read_behind(name, address)[1].result(20).status is ReadStatus.DONE
    stuck.behind[:] = 0

    stuck.read.abort()
    _, posted = stuck.read_behind(name, address)
    until(lambda: bool(stuck.behind[:4096].any()))
    transport.recycle(grace_s=20).result(20)

    assert posted.result(20).status is ReadStatus.DONE
    assert np.array_equal(stuck.behind, content(LONG, 4))


def test_memory_and_peers_come_and_go_after_it(over_tcp: None, get_stuck: GetStuck) -> None:
    stuck = get_stuck()
    transport = stuck.reader.transport
    stuck.read.abort()
    transport.recycle(grace_s=0.1).result(20)

    transport.deregister(stuck.reader.registration).result(20)
    transport.remove_peer(stuck.name).result(20)
    stuck.peer.signal(signal.SIGCONT)
    answer = stuck.peer.ask("everything")
    name = transport.add_peer(bytes.fromhex(answer["metadata"])).result(20)
    stuck.reader.allocate(LONG)

    outcome = stuck.reader.read(name, stuck.address, [(0, 0, LONG)])
    assert outcome.status is ReadStatus.DONE


def test_a_peer_that_died_meanwhile_is_lost_and_the_others_are_not(
    over_tcp: None, get_stuck: GetStuck, start_peer: StartPeer
) -> None:
    stuck = get_stuck()
    reader, transport = stuck.reader, stuck.reader.transport
    other = start_peer("other/1")
    address, metadata = other.allocate(MIB, seed=4)
    name = transport.add_peer(metadata).result(20)
    stuck.read.abort()
    transport.recycle(grace_s=0.1).result(20)
    stuck.peer.end()

    transport.recycle(grace_s=0.1).result(20)
    lost = reader.read(stuck.name, stuck.address, [(0, 0, MIB)])

    assert code_of(lost) is ErrorCode.PEER_LOST
    assert reader.read(name, address, [(0, 0, MIB)]).status is ReadStatus.DONE


def test_without_room_for_a_new_agent_nothing_has_ended(
    over_tcp: None, get_stuck: GetStuck
) -> None:
    stuck = get_stuck()
    transport = stuck.reader.transport
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    gc.disable()  # no agent of an earlier test is destroyed now: UCX aborts without descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        error = transport.recycle(grace_s=0.1).exception(20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        gc.enable()
    was_done = stuck.ended.done()
    stuck.peer.signal(signal.SIGCONT)
    _, later = stuck.read_behind(stuck.name, stuck.address)

    assert isinstance(error, TransferFailed)
    assert "no NIXL agent" in error.message
    assert not was_done
    assert stuck.ended.result(20).status is ReadStatus.DONE
    assert later.result(20).status is ReadStatus.DONE


def test_nothing_lands_either_when_all_that_referred_to_the_retired_agent_is_gone(
    over_tcp: None, get_stuck: GetStuck
) -> None:
    stuck = get_stuck()
    transport = stuck.reader.transport
    stuck.read.abort()
    transport.recycle(grace_s=0.1).result(20)
    stuck.reader.memory[:] = CANARY
    stuck.peer.signal(signal.SIGCONT)
    assert stuck.read_behind(stuck.name, stuck.address)[1].result(20).status is ReadStatus.DONE

    transport._recycler = AgentRecycler(destroys=False)
    gc.collect()

    assert (stuck.reader.memory[:LONG] == CANARY).all()
