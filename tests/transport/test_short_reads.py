"""Short reads on the caller's thread: which ones, for how long, and what becomes of the others."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from nixl import _api

from kvbus.errors import ClosedError, TransferFailed
from kvbus.transport import ReadStatus, TransportLimits
from tests.transport.conftest import Meet, Place, Reader, Span

KIB = 1 << 10
LONG_S = 60.0
HERE, THERE = "MainThread", "kvbus-transport"
ONE = (0, 0, KIB)


@pytest.fixture
def pair(meet: Meet) -> Meet:
    """A reader that has read from a peer once; its short reads are done here."""

    def make(**limits: Any) -> tuple[Reader, Place]:
        limits = {"here_bytes": 64 * KIB, "here_s": LONG_S, **limits}
        return meet(256 * KIB, TransportLimits(**limits), connected=True)

    return make


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_the_second_short_read_is_done_when_it_was_asked_for(
    pair: Meet, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    reader, place = pair()
    spans = [(8 * KIB * to, 8 * KIB * at, 2 * KIB) for to, at in ((1, 7), (3, 2), (6, 4))]

    _, ended = reader.start(place, *spans)

    assert ended.done()
    assert ended.result().status is ReadStatus.DONE
    assert ended.result().num_bytes == 6 * KIB
    assert reader.threads == [THERE, HERE]
    for to, at, size in spans:
        assert np.array_equal(reader.memory[to : to + size], place.content[at : at + size])
    assert reader.transport.stats().outstanding_reads == 0


@pytest.mark.parametrize(
    ("limits", "spans"),
    [
        ({}, [(0, 0, 64 * KIB + 1)]),
        ({"here_descriptors": 2}, [(8 * KIB * at, 8 * KIB * at, KIB) for at in range(3)]),
        ({"here_bytes": 0}, [(0, 0, 1)]),
    ],
    ids=["bytes", "descriptors", "none allowed"],
)
def test_a_read_that_is_too_long_is_the_threads(
    pair: Meet, limits: dict[str, Any], spans: list[Span]
) -> None:
    reader, place = pair(**limits)

    outcome = reader.read(place, *spans)

    assert outcome.status is ReadStatus.DONE
    assert reader.threads == [THERE, THERE]


def test_a_short_read_does_not_wait_for_the_thread_when_that_is_in_nixl(pair: Meet) -> None:
    reader, place = pair()
    goes_on = reader.hold_thread()

    _, ended = reader.start(place, ONE)
    was_done = ended.done()
    goes_on.set()

    assert not was_done
    assert ended.result(LONG_S).status is ReadStatus.DONE
    assert reader.threads == [THERE] * 3


@pytest.mark.parametrize("aborts", [False, True])
def test_a_read_that_takes_longer_is_left_to_the_thread_and_so_are_those_after_it(
    over_tcp: None, pair: Meet, *, aborts: bool
) -> None:
    reader, place = pair(here_s=1e-3)
    place.peer.stop()
    read, ended = reader.start(place, (4 * KIB, 4 * KIB, KIB))
    if aborts:
        read.abort()

    was_done = ended.done()
    place.peer.go_on()
    first, num_later = ended.result(LONG_S), 0
    while reader.threads[-1] == THERE and num_later < 1000:
        assert reader.read(place, ONE).status is ReadStatus.DONE
        num_later += 1

    assert not was_done
    assert first.status is (ReadStatus.ABORTED if aborts else ReadStatus.DONE)
    assert 10 < reader.threads.count(THERE) < 1000
    at = slice(4 * KIB, 5 * KIB)
    assert aborts or np.array_equal(reader.memory[at], place.content[at])


def test_a_read_under_which_nixl_fails_on_the_callers_thread_has_not_ended_and_the_agent_hears_it(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: Future[Exception] = Future()
    limits = TransportLimits(here_bytes=64 * KIB, here_s=LONG_S)
    reader, place = meet(256 * KIB, limits, connected=True, on_broken=broken.set_result)
    monkeypatch.setattr(_api.nixl_agent, "transfer", lambda *_: "PROC")
    monkeypatch.setattr(_api.nixl_agent, "check_xfer_state", lambda *_: "PROC")
    monkeypatch.setattr(_api.nixl_agent, "get_new_notifs", _no_progress)

    _, ended = reader.start(place, ONE)

    error = broken.result(LONG_S)
    assert isinstance(error, TransferFailed)
    assert "no progress" in error.message
    assert not ended.done()
    with pytest.raises(ClosedError):
        reader.transport.ping()


def _no_progress(*_: object) -> None:
    raise RuntimeError("the backend is gone")
