"""Short reads on the caller's thread: which ones, for how long, and what becomes of the others."""

import signal
from typing import Any

import numpy as np
import pytest

from kvbus.transport import ReadStatus, TransportLimits
from tests.transport.conftest import Link, MakeLink, content, until

KIB = 1 << 10
LONG_S = 20.0
HERE, THERE = "MainThread", "kvbus-transport"


@pytest.fixture
def pair(link: MakeLink) -> MakeLink:
    """A peer, and a reader that has read from it once; its short reads are done here."""

    def make(**limits: Any) -> Link:
        limits = {"here_bytes": 64 * KIB, "here_s": LONG_S, **limits}
        return link(256 * KIB, TransportLimits(**limits), connected=True)

    return make


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_the_second_short_read_is_done_when_it_was_asked_for(
    pair: MakeLink, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    _, reader, name, address = pair()
    spans = [(8 * KIB * to, 8 * KIB * at, 2 * KIB) for to, at in ((1, 7), (3, 2), (6, 4))]

    _, ended = reader.start(name, address, spans)

    assert ended.done()
    assert ended.result().status is ReadStatus.DONE
    assert ended.result().num_bytes == 6 * KIB
    assert reader.threads == [THERE, HERE]
    theirs = content(256 * KIB, 1)
    for to, at, size in spans:
        assert np.array_equal(reader.memory[to : to + size], theirs[at : at + size])
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
    pair: MakeLink, limits: dict[str, Any], spans: list[tuple[int, int, int]]
) -> None:
    _, reader, name, address = pair(**limits)

    outcome = reader.read(name, address, spans)

    assert outcome.status is ReadStatus.DONE
    assert reader.threads == [THERE, THERE]


def test_a_short_read_does_not_wait_for_the_thread_when_that_is_in_nixl(pair: MakeLink) -> None:
    _, reader, name, address = pair()
    goes_on = reader.hold_thread()

    _, ended = reader.start(name, address, [(0, 0, KIB)])
    was_done = ended.done()
    goes_on.set()

    assert not was_done
    assert ended.result(LONG_S).status is ReadStatus.DONE
    assert reader.threads == [THERE] * 3


def test_a_read_that_takes_longer_is_left_to_the_thread_and_so_are_those_after_it(
    over_tcp: None, pair: MakeLink
) -> None:
    peer, reader, name, address = pair(here_s=1e-3)
    peer.signal(signal.SIGSTOP)

    _, ended = reader.start(name, address, [(4 * KIB, 4 * KIB, KIB)])
    was_done = ended.done()
    peer.signal(signal.SIGCONT)
    outcomes = [ended.result(LONG_S)]
    while reader.threads[-1] == THERE and len(outcomes) < 1000:
        outcomes.append(reader.read(name, address, [(0, 0, KIB)]))

    assert not was_done
    assert all(outcome.status is ReadStatus.DONE for outcome in outcomes)
    assert 10 < reader.threads.count(THERE) < 1000
    assert np.array_equal(
        reader.memory[4 * KIB : 5 * KIB], content(256 * KIB, 1)[4 * KIB : 5 * KIB]
    )


def test_while_a_long_read_is_under_way_a_short_one_is_the_threads(
    over_tcp: None, pair: MakeLink
) -> None:
    peer, reader, name, address = pair()
    peer.signal(signal.SIGSTOP)
    _, long = reader.start(name, address, [(0, 0, 256 * KIB)])
    until(lambda: reader.transport.stats().outstanding_handles > 0)

    _, short = reader.start(name, address, [(0, 0, KIB)])
    was_done = short.done()
    peer.signal(signal.SIGCONT)

    assert not was_done
    assert long.result(LONG_S).status is short.result(LONG_S).status is ReadStatus.DONE
    assert HERE not in reader.threads


def test_a_read_that_was_left_to_the_thread_can_be_aborted_and_ends_once(
    over_tcp: None, pair: MakeLink
) -> None:
    peer, reader, name, address = pair(here_s=1e-3)
    peer.signal(signal.SIGSTOP)
    read, ended = reader.start(name, address, [(0, 0, KIB)])

    read.abort()
    was_done = ended.done()
    peer.signal(signal.SIGCONT)

    assert not was_done
    assert ended.result(LONG_S).status is ReadStatus.ABORTED
