"""No answer whatever of a memory socket does more than to refuse it, or leaves anything behind."""

import array
import os
import socket
from contextlib import suppress
from pathlib import Path

import anyio
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import KVBusError
from kvbus.memory.attach import FrameChannel
from kvbus.protocol import Handshake, HandshakeDone, LentSegment, MemoryLent, to_body
from kvbus_decode.peer.lend_client import LentSegments
from tests.vectors import examples

_, DONE = examples.ROOMS["peer"][Handshake]
assert isinstance(DONE, HandshakeDone)
WANTED = [
    LentSegment(rank.rank, segment.segment_id, segment.size_bytes)
    for rank in DONE.memory.ranks
    for segment in rank.segments
]


def frame(message: object) -> bytes:
    body: bytes = msgpack.packb(message)
    return len(body).to_bytes(4, "little") + body


segments = st.sampled_from(WANTED) | st.builds(
    LentSegment,
    rank=st.integers(0, 3),
    segment_id=st.sampled_from(["kv", "x"]),
    size_bytes=st.sampled_from([1, 4096, 1 << 50]),
)
answers = st.builds(
    MemoryLent,
    agent_boot=st.sampled_from(["boot", "another"]),
    num_segments=st.integers(0, 5),
    segments=st.lists(segments, max_size=3).map(tuple),
)
chunks = st.one_of(
    st.binary(max_size=60),
    st.binary(max_size=40).map(lambda body: len(body).to_bytes(4, "little") + body),
    st.dictionaries(st.sampled_from(["ok", "error", "x"]), st.integers(0, 9)).map(frame),
    answers.map(lambda answer: frame({"ok": to_body(answer)})),
)
files = st.lists(st.sampled_from([0, 4096, WANTED[0].size_bytes, -1]), max_size=3)


def send(connected: socket.socket, chunk: bytes, sizes: list[int]) -> None:
    """A chunk with a file of each size; -1 is a file that is no memory."""
    fds = [os.open(os.devnull, os.O_RDONLY) if size < 0 else memory_file(size) for size in sizes]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with suppress(OSError):  # the other side has had enough
        if chunk:
            connected.sendmsg([chunk], rights)
    for fd in fds:
        os.close(fd)


def memory_file(size_bytes: int) -> int:
    fd = os.memfd_create("fuzzed")
    os.ftruncate(fd, size_bytes)
    return fd


async def take(ours: socket.socket) -> int:
    """Ask, and give back what came of it; returns how many segments that was."""
    assert isinstance(DONE, HandshakeDone)
    channel = FrameChannel(ours, frame_timeout_s=0.2)
    lent = LentSegments(channel, "boot", DONE)
    try:
        with suppress(KVBusError, anyio.EndOfStream, OSError):
            await lent.take_all()
    finally:
        channel.close()
        for mapping in lent.mapped.values():
            mapping.close()
    return len(lent.mapped)


@given(st.lists(st.tuples(chunks, files), max_size=3))
def test_whatever_is_answered_is_refused_and_leaves_no_file_and_no_mapping(
    sent: list[tuple[bytes, list[int]]],
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with theirs:
        for chunk, sizes in sent:
            send(theirs, chunk, sizes)
        theirs.shutdown(socket.SHUT_WR)
        anyio.run(take, ours)

    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert "memfd:fuzzed" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("at_once", [1, len(WANTED)])
def test_what_is_as_the_handshake_said_is_taken_in_as_many_answers_as_it_comes(
    at_once: int,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with theirs:
        for first in range(0, len(WANTED), at_once):
            some = tuple(WANTED[first : first + at_once])
            answer = frame({"ok": to_body(MemoryLent("boot", len(WANTED), some))})
            send(theirs, answer, [one.size_bytes for one in some])

        assert anyio.run(take, ours) == len(WANTED)
