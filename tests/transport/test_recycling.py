"""A NIXL agent that is made anew: what could never end has ended, and nothing of it lands."""

import gc
import resource
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbus.errors import ErrorCode, TransferFailed
from kvbus.transport import Read, ReadOutcome, ReadStatus, TransportLimits
from tests.transport.conftest import MIB, WITHIN_S, Bytes, Meet, Place, Reader, until

LONG = 64 * MIB
"""More than the sockets, or the queues in shared memory, between two processes hold."""
CANARY = 0xA5
FABRICS = {"tcp": "tcp", "shared memory": "^cma"}
"""With CMA this process reads the other's memory itself: nothing waits for a peer."""


@dataclass
class Stuck:
    """A reader, and what it reads into the first `LONG` bytes from a peer that was stopped.

    Behind those is room for what it reads later.
    """

    reader: Reader
    place: Place
    read: Read
    ended: Future[ReadOutcome]

    def recycle(self, grace_s: float = 0.1) -> int:
        """Give the read up, and make the agent anew."""
        self.read.abort()
        return self.reader.transport.recycle(grace_s=grace_s).result(WITHIN_S)

    def read_behind(self, place: Place) -> Future[ReadOutcome]:
        return self.reader.start(place, (LONG, 0, LONG))[1]

    def can_read_behind(self, place: Place) -> bool:
        is_done = self.read_behind(place).result(WITHIN_S).status is ReadStatus.DONE
        return is_done and np.array_equal(self.behind, place.content)

    @property
    def behind(self) -> Bytes:
        return self.reader.memory[LONG:]

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has landed since the canary was there."""
        return bool((self.reader.memory[:LONG] == CANARY).all())


GetStuck = Callable[..., Stuck]


@pytest.fixture
def get_stuck(meet: Meet) -> GetStuck:
    def get(*, is_early: bool = True, **options: Any) -> Stuck:
        limits = TransportLimits(slice_bytes=LONG)
        reader, place = meet(LONG, limits, room=2 * LONG, connected=True, **options)
        while True:
            stuck = Stuck(reader, place, *begin(reader, place, is_early=is_early))
            if not stuck.ended.done():
                return stuck
            place.peer.go_on()

    def begin(reader: Reader, place: Place, *, is_early: bool) -> tuple[Read, Future[ReadOutcome]]:
        """A read during which the peer is stopped; it may have ended before."""
        transport = reader.transport
        reader.memory[:] = 0
        if is_early:
            place.peer.stop()
        read, ended = reader.start(place)
        if not is_early:
            until(lambda: bool(reader.memory[:4096].any()))
            place.peer.stop()
        until(lambda: ended.done() or transport.stats().outstanding_handles > 0)
        passes = transport.stats().progress_calls
        until(lambda: ended.done() or transport.stats().progress_calls > passes + 50)
        return read, ended

    return get


def code_of(outcome: ReadOutcome) -> ErrorCode | None:
    return outcome.error.code if outcome.error else None


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("is_early", [True, False], ids=["before its answer", "within it"])
@pytest.mark.parametrize("nic_writes", [False, True], ids=["kept", "destroyed"])
def test_nothing_of_a_recycled_read_lands_when_its_peer_goes_on_and_what_was_posted_ends_before(
    monkeypatch: pytest.MonkeyPatch,
    get_stuck: GetStuck,
    fabric: str,
    *,
    is_early: bool,
    nic_writes: bool,
) -> None:
    monkeypatch.setenv("UCX_TLS", FABRICS[fabric])
    stuck = get_stuck(is_early=is_early, nic_writes=nic_writes)
    other = stuck.reader.meet("other-1", LONG, seed=4)

    posted = stuck.read_behind(other)
    until(lambda: bool(stuck.behind[:4096].any()))
    num_handles = stuck.recycle(grace_s=20)
    outcome = stuck.ended.result(WITHIN_S)
    stuck.reader.memory[:] = CANARY
    stuck.place.peer.go_on()

    # UCX aborts the peer of one that was destroyed
    assert nic_writes or stuck.can_read_behind(stuck.place)
    assert stuck.can_read_behind(other)
    assert outcome.status is ReadStatus.ABORTED
    assert posted.result(WITHIN_S).status is ReadStatus.DONE
    assert num_handles == 1
    assert stuck.is_untouched
    assert stuck.place.peer.process.poll() is None or nic_writes
    stats = stuck.reader.transport.stats()
    assert (stats.outstanding_handles, stats.retired_agents) == (0, 1)


def test_what_waits_goes_on_and_what_does_not_end_in_time_fails(
    over_tcp: None, get_stuck: GetStuck
) -> None:
    stuck = get_stuck()
    other = stuck.reader.meet("other-1", LONG, seed=4)

    recycled = stuck.reader.transport.recycle(grace_s=0.5)
    waiting = stuck.read_behind(other)
    recycled.result(WITHIN_S)

    assert code_of(stuck.ended.result(WITHIN_S)) is ErrorCode.TRANSFER_FAILED
    assert waiting.result(WITHIN_S).status is ReadStatus.DONE
    assert np.array_equal(stuck.behind, other.content)


def test_an_agent_that_writes_telemetry_is_recycled(
    over_tcp: None, get_stuck: GetStuck, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "1")
    monkeypatch.setenv("NIXL_TELEMETRY_DIR", str(tmp_path))
    stuck = get_stuck()

    stuck.recycle()
    stuck.place.peer.go_on()

    assert stuck.can_read_behind(stuck.place)
    assert {"reader-boot", "reader-boot-1"} <= {one.name for one in tmp_path.iterdir()}


def test_memory_and_peers_come_and_go_after_it_and_one_that_died_is_lost(
    over_tcp: None, get_stuck: GetStuck
) -> None:
    stuck = get_stuck()
    reader, place = stuck.reader, stuck.place
    other = reader.meet("other-1", seed=4)
    stuck.recycle()

    reader.transport.deregister(reader.registration).result(WITHIN_S)
    reader.transport.remove_peer(place.name).result(WITHIN_S)
    place.peer.go_on()
    place.metadata = place.peer.metadata("everything")
    reader.add(place)
    reader.allocate(LONG)
    assert reader.can_read(place)

    place.peer.end()
    stuck.recycle()
    assert code_of(reader.read(place)) is ErrorCode.PEER_LOST
    assert reader.can_read(other)


def test_without_room_for_a_new_agent_nothing_has_ended(
    over_tcp: None, get_stuck: GetStuck
) -> None:
    stuck = get_stuck()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    gc.disable()  # no agent of an earlier test is destroyed now: UCX aborts without descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        error = stuck.reader.transport.recycle(grace_s=0.1).exception(20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        gc.enable()
    was_done = stuck.ended.done()
    stuck.place.peer.go_on()

    assert isinstance(error, TransferFailed)
    assert "no NIXL agent" in error.message
    assert not was_done
    assert stuck.can_read_behind(stuck.place)
    assert stuck.ended.result(WITHIN_S).status is ReadStatus.DONE


def test_nothing_lands_either_when_the_transport_of_the_retired_agent_is_gone(
    over_tcp: None, get_stuck: GetStuck
) -> None:
    stuck = get_stuck()
    reader = stuck.reader
    stuck.recycle()
    reader.memory[:] = CANARY
    stuck.place.peer.go_on()
    assert stuck.can_read_behind(stuck.place)

    reader.transport.close(timeout_s=5).result(WITHIN_S)
    stuck.read = stuck.ended = None  # type: ignore[assignment]  # they may refer to it
    del reader.transport
    gc.collect()

    assert stuck.is_untouched
