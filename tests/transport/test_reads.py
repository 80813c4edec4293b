"""Bytes between two real processes: what arrives, in which turn, and what an abort leaves."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from kvbus.errors import ErrorCode, LocalError, TransferFailed
from kvbus.transport import ReadOutcome, ReadStatus, TransportLimits, check_rows
from tests.transport.conftest import MIB, WITHIN_S, Meet, Span


def scattered(rng: np.random.Generator, num: int, size_bytes: int, slots: int) -> list[Span]:
    """As many spans at random places of both sides, of random lengths, without overlap here."""
    to = rng.permutation(slots)[:num] * size_bytes
    at = rng.permutation(slots)[:num] * size_bytes
    lengths = rng.integers(1, size_bytes + 1, num)
    rows = zip(to.tolist(), at.tolist(), lengths.tolist(), strict=True)
    return [(here, there, length) for here, there, length in rows]


@pytest.mark.parametrize("transports", ["all", "tcp"])
@pytest.mark.parametrize("slice_bytes", [64 << 10, 5000], ids=["many in one", "one in many"])
def test_scattered_descriptors_land_where_they_belong_and_nowhere_else(
    meet: Meet, monkeypatch: pytest.MonkeyPatch, transports: str, slice_bytes: int
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    limits = TransportLimits(slice_bytes=slice_bytes, slice_descriptors=37)
    reader, place = meet(4 * MIB, limits)
    spans = scattered(np.random.default_rng(2), 300, 8192, 512)
    theirs, expected = place.content, np.zeros(4 * MIB, np.uint8)
    for to, at, size in spans:
        expected[to : to + size] = theirs[at : at + size]

    outcome = reader.read(place, *spans)

    assert outcome.status is ReadStatus.DONE
    assert outcome.num_bytes == sum(size for _, _, size in spans)
    assert outcome.num_slices >= max(9, outcome.num_bytes / slice_bytes)
    assert np.array_equal(reader.memory, expected)


@pytest.mark.parametrize(
    ("size_bytes", "priority"), [(4096, 0), (64 * MIB, 1)], ids=["small", "urgent"]
)
def test_a_read_that_is_small_or_urgent_overtakes_a_large_one(
    meet: Meet, size_bytes: int, priority: int
) -> None:
    """Whose turn it is otherwise is shown in `tests/table/test_fair.py`."""
    limits = TransportLimits(slice_bytes=256 << 10)
    reader, place = meet(64 * MIB, limits, room=128 * MIB, connected=True)
    ended: list[str] = []

    both_asked, done = reader.hold_thread(), Future[ReadOutcome]()
    _, large = reader.start(place)
    here, there = (
        np.array([[at, size_bytes, 0]], np.uint64)
        for at in (reader.memory.ctypes.data + 64 * MIB, place.address)
    )
    large.add_done_callback(lambda _: ended.append("large"))
    done.add_done_callback(lambda _: ended.append("other"))
    reader.transport.read(place.name, here, there, on_end=done.set_result, priority=priority)
    both_asked.set()

    assert large.result(WITHIN_S).num_slices == 256
    assert ended == ["other", "large"]


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_reads_over_shared_memory_end_undriven_once_they_are_connected(
    meet: Meet, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    reader, place = meet()

    found = []
    for spans in ([(0, 0, 8)], [], [(0, 0, 8), (64, 64, 4096)]):
        found.append(reader.transport.ends_undriven(place.name))
        assert reader.read(place, *spans).status is ReadStatus.DONE
    found.append(reader.transport.ends_undriven(place.name))
    reader.transport.remove_peer(place.name).result(WITHIN_S)

    assert found == [False, False, *[transports == "all"] * 2]
    assert not reader.transport.ends_undriven(place.name)


def test_more_reads_than_allowed_are_refused_as_busy(meet: Meet, over_tcp: None) -> None:
    reader, place = meet(64 * MIB, TransportLimits(max_reads=1), connected=True)
    place.peer.stop()
    _, first = reader.start(place)
    with pytest.raises(LocalError) as refused:
        reader.start(place, (0, 0, 4096))
    place.peer.go_on()

    assert refused.value.code is ErrorCode.BUSY
    assert first.result(WITHIN_S).status is ReadStatus.DONE
    assert reader.can_read(place)


def test_a_read_of_memory_that_nobody_registered_fails_alone(meet: Meet) -> None:
    reader, place = meet()

    outcome = reader.read(place, (0, 64 * MIB, 4096))

    assert outcome.status is ReadStatus.FAILED
    assert isinstance(outcome.error, TransferFailed)
    assert outcome.error.detail["nixl"] == "nixlNotFoundError"
    assert reader.can_read(place)


ROW, TWO = np.array([[8, 1, 0]], np.uint64), np.ones((2, 3), np.uint64)


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        (np.ones((2, 3), np.int64), TWO),
        (np.ones((2, 2), np.uint64), TWO),
        (TWO, np.ones((1, 3), np.uint64)),
        (ROW, np.array([[8, 2, 0]], np.uint64)),
        (np.array([[8, 0, 0]], np.uint64), np.array([[8, 0, 0]], np.uint64)),
        ([[8, 1, 0]], ROW),
    ],
    ids=["signed", "two columns", "a row less", "lengths that differ", "no length", "no array"],
)
def test_wrong_arrays_are_refused_before_anything_is_posted(local: Any, remote: Any) -> None:
    with pytest.raises(LocalError):
        check_rows(local, remote)


def test_memory_is_readable_once_its_metadata_is_added_also_of_an_address_or_peer_that_was_known(
    meet: Meet,
) -> None:
    reader, place = meet()
    later = reader.told(place.peer, MIB, seed=2)
    later.name = place.name

    not_added = reader.read(later)
    reader.add(later)
    assert not_added.status is ReadStatus.FAILED
    assert later.name == place.name == "peer-1"
    assert reader.can_read(later)

    place.seed, place.metadata = 6, place.peer.metadata("refill", index=0, seed=6)
    reader.add(place)
    assert reader.can_read(place)

    place.metadata = place.peer.metadata("everything")
    reader.transport.remove_peer(place.name).result(WITHIN_S)
    removed = reader.read(place)
    reader.add(place)
    assert removed.status is ReadStatus.FAILED
    assert reader.can_read(place)


def test_metadata_may_be_added_while_a_read_is_in_flight(over_tcp: None, meet: Meet) -> None:
    reader, place = meet(128 * MIB, connected=True)
    later = reader.told(place.peer, MIB, seed=2)

    place.peer.stop()
    _, ended = reader.start(place)
    reader.add(later)
    in_flight = not ended.done()
    place.peer.go_on()

    assert in_flight
    assert ended.result(WITHIN_S).status is ReadStatus.DONE
    assert (reader.memory == place.content).all()
    assert reader.can_read(later)


def test_a_read_that_ucx_cannot_post_names_the_settings_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, meet: Meet
) -> None:
    monkeypatch.setenv("UCX_PROTO_ENABLE", "n")
    reader, place = meet()

    error = reader.read(place).error

    assert error is not None
    assert "UCX_PROTO_ENABLE=n" in error.message
