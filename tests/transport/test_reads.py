"""Bytes between two real processes: what arrives, in which turn, and what an abort leaves."""

import signal
import weakref
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from kvbus.errors import ErrorCode, LocalError, TransferFailed
from kvbus.transport import ReadOutcome, ReadStatus, TransportLimits
from tests.transport.conftest import MakeLink, StartReader, content, until

MIB = 1 << 20


def scattered(
    rng: np.random.Generator, num: int, size_bytes: int, slots: int
) -> list[tuple[int, int, int]]:
    """As many spans at random places of both sides, of random lengths, without overlap here."""
    to = rng.permutation(slots)[:num] * size_bytes
    at = rng.permutation(slots)[:num] * size_bytes
    lengths = rng.integers(1, size_bytes + 1, num)
    rows = zip(to.tolist(), at.tolist(), lengths.tolist(), strict=True)
    return [(here, there, length) for here, there, length in rows]


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_scattered_descriptors_land_where_they_belong_and_nowhere_else(
    link: MakeLink, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    limits = TransportLimits(slice_bytes=64 << 10, slice_descriptors=37)
    _, reader, name, address = link(4 * MIB, limits)
    spans = scattered(np.random.default_rng(2), 300, 8192, 512)
    theirs, expected = content(4 * MIB, 1), np.zeros(4 * MIB, np.uint8)
    for to, at, size in spans:
        expected[to : to + size] = theirs[at : at + size]

    outcome = reader.read(name, address, spans)

    assert outcome.status is ReadStatus.DONE
    assert outcome.num_bytes == sum(size for _, _, size in spans)
    assert outcome.num_descriptors == 300
    assert outcome.num_slices >= 9
    assert np.array_equal(reader.memory, expected)


def test_a_descriptor_longer_than_a_slice_arrives_whole(link: MakeLink) -> None:
    _, reader, name, address = link(2 * MIB, TransportLimits(slice_bytes=100_000), seed=3)

    outcome = reader.read(name, address, [(0, 0, 2 * MIB)])

    assert outcome.num_slices == 21
    assert np.array_equal(reader.memory, content(2 * MIB, 3))


def test_a_read_of_nothing_is_done_at_once(start_reader: StartReader) -> None:
    reader = start_reader()

    outcome = reader.read("nobody", 0, [])

    assert (outcome.status, outcome.num_bytes, outcome.num_slices) == (ReadStatus.DONE, 0, 0)


def test_a_small_read_overtakes_a_large_one(link: MakeLink) -> None:
    _, reader, name, address = link(
        128 * MIB, TransportLimits(slice_bytes=256 << 10), seed=4, connected=True
    )
    ended = []

    both_asked = reader.hold_thread()
    _, large = reader.start(name, address, [(0, 0, 128 * MIB - 4096)])
    _, small = reader.start(name, address, [(128 * MIB - 4096, 0, 4096)])
    large.add_done_callback(lambda _: ended.append("large"))
    small.add_done_callback(lambda _: ended.append("small"))
    both_asked.set()

    assert large.result(20).num_slices == 512
    assert ended == ["small", "large"]


def test_after_an_abort_ended_no_byte_changes(link: MakeLink, over_tcp: None) -> None:
    _, reader, name, address = link(256 * MIB, TransportLimits(slice_bytes=16 << 10), seed=5)

    read, ended = reader.start(name, address, [(0, 0, 256 * MIB)])
    until(lambda: bool(reader.memory[0] or reader.memory[4096:8192].any()))
    read.abort()
    outcome = ended.result(20)
    at_end = reader.memory.copy()
    again = reader.read(name, address, [(0, 0, MIB)])

    assert outcome.status is ReadStatus.ABORTED
    assert outcome.num_bytes < 256 * MIB
    assert again.status is ReadStatus.DONE
    assert np.array_equal(reader.memory[MIB:], at_end[MIB:])
    assert not at_end[outcome.num_bytes :].any()


def test_more_reads_than_allowed_are_refused_as_busy(link: MakeLink, over_tcp: None) -> None:
    peer, reader, name, address = link(
        64 * MIB, TransportLimits(max_reads=1), seed=6, connected=True
    )
    peer.signal(signal.SIGSTOP)
    _, first = reader.start(name, address, [(0, 0, 64 * MIB)])
    with pytest.raises(LocalError) as refused:
        reader.start(name, address, [(0, 0, 4096)])
    peer.signal(signal.SIGCONT)

    assert refused.value.code is ErrorCode.BUSY
    assert first.result(20).status is ReadStatus.DONE
    assert reader.read(name, address, [(0, 0, 4096)]).status is ReadStatus.DONE


def test_a_read_of_memory_that_nobody_registered_fails_alone(link: MakeLink) -> None:
    _, reader, name, address = link(MIB, seed=7)

    outcome = reader.read(name, address + 64 * MIB, [(0, 0, 4096)])

    assert outcome.status is ReadStatus.FAILED
    assert isinstance(outcome.error, TransferFailed)
    assert outcome.error.detail["nixl"] == "nixlNotFoundError"
    assert reader.read(name, address, [(0, 0, 4096)]).status is ReadStatus.DONE


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        (np.ones((2, 3), np.int64), np.ones((2, 3), np.uint64)),
        (np.ones((2, 2), np.uint64), np.ones((2, 3), np.uint64)),
        (np.ones((2, 3), np.uint64), np.ones((1, 3), np.uint64)),
        (np.array([[8, 1, 0]], np.uint64), np.array([[8, 2, 0]], np.uint64)),
        (np.array([[8, 0, 0]], np.uint64), np.array([[8, 0, 0]], np.uint64)),
        ([[8, 1, 0]], np.array([[8, 1, 0]], np.uint64)),
    ],
)
def test_wrong_arrays_are_refused_before_anything_is_posted(
    start_reader: StartReader, local: Any, remote: Any
) -> None:
    reader = start_reader()

    with pytest.raises(LocalError):
        reader.transport.read("peer", local, remote, on_end=print)

    assert reader.transport.stats().outstanding_reads == 0


class Caller:
    """Holds its read and is what the read calls back, as callers do."""

    def __init__(self) -> None:
        self.read: Any = None
        self.ended: Future[ReadStatus] = Future()

    def on_end(self, outcome: ReadOutcome) -> None:
        self.ended.set_result(outcome.status)


def test_a_read_that_has_ended_keeps_neither_its_descriptors_nor_its_caller(
    start_reader: StartReader,
) -> None:
    transport, caller = start_reader().transport, Caller()
    rows = np.ones((1, 3), np.uint64)
    kept = weakref.ref(rows), weakref.ref(caller)
    caller.read = transport.read("nobody", rows, rows, on_end=caller.on_end)
    ended, read = caller.ended, caller.read
    del rows, caller

    status = ended.result(20)
    transport.metadata().result(20)  # what the thread did before is over

    assert status is ReadStatus.FAILED
    assert [ref() for ref in kept] == [None, None]
    read.abort()
