"""What the attach server refuses, and that it goes on for the others."""

import array
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.memory.attach import AttachClient, AttachServer
from tests.examples import num_examples
from tests.memory.conftest import Serving

pytestmark = pytest.mark.anyio
HELLO = b"\x80"  # an empty map


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@contextmanager
def raw(path: Path) -> Iterator[socket.socket]:
    """A C++ author's client: plain blocking calls, made in threads."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(str(path))
        yield connected


def send_with_fds(connected: socket.socket, part: bytes, fds: list[int]) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    assert connected.sendmsg([part], [rights]) == len(part)


async def replies_until_end(connected: socket.socket) -> list[dict[str, Any]]:
    def read_all() -> bytes:
        read = b""
        with suppress(ConnectionResetError):  # the end, when the server left bytes unread
            while chunk := connected.recv(65536):
                read += chunk
        return read

    rest = await anyio.to_thread.run_sync(read_all)
    replies = []
    while rest:
        length = int.from_bytes(rest[:4], "little")
        replies.append(msgpack.unpackb(rest[4 : 4 + length]))
        rest = rest[4 + length :]
    return replies


async def test_several_messages_in_one_write_are_answered_in_order(
    serving: Serving, null_fd: int
) -> None:
    async with serving() as recorded:
        with raw(recorded.server.path) as connected:
            connected.send(framed(HELLO))
            send_with_fds(connected, framed(HELLO) + framed(HELLO), [null_fd, null_fd])
            connected.shutdown(socket.SHUT_WR)
            replies = await replies_until_end(connected)

    assert [reply["ok"]["seen"] for reply in replies] == [0, 2, 0]


async def test_a_message_that_comes_byte_by_byte_is_one_message(
    serving: Serving, null_fd: int
) -> None:
    frame = framed(msgpack.packb({"op": "hello"}))
    async with serving() as recorded:
        with raw(recorded.server.path) as connected:
            send_with_fds(connected, frame[:1], [null_fd])
            for position in range(1, len(frame)):
                await anyio.lowlevel.checkpoint()
                connected.send(frame[position : position + 1])
            connected.shutdown(socket.SHUT_WR)
            replies = await replies_until_end(connected)

    assert replies == [{"ok": {"seen": 1}}]


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x01", b"\x90", b"\x81\x01\x02", b"\x81\xc4\x01a\x02", b"\x80\x80"]
)
async def test_a_body_that_is_no_map_gets_an_error_and_the_connection_goes_on(
    serving: Serving, body: bytes, null_fd: int, num_open_fds: Callable[[], int]
) -> None:
    before = num_open_fds()
    async with serving() as recorded:
        with raw(recorded.server.path) as connected:
            send_with_fds(connected, framed(body), [null_fd])
            connected.send(framed(HELLO))
            connected.shutdown(socket.SHUT_WR)
            refused, answered = await replies_until_end(connected)

    assert refused["error"]["code"] == "malformed"
    assert answered == {"ok": {"seen": 0}}
    assert num_open_fds() == before


BROKEN: dict[str, tuple[list[tuple[bytes, int]], str, str]] = {
    "a_length_beyond_the_limit": ([((65_537).to_bytes(4, "little"), 1)], "too_large", ""),
    "too_many_descriptors": ([(framed(HELLO), 100)], "malformed", "more than 64"),
    "too_many_spread_over_the_first_bytes": (
        [(b"\x01", 40), (b"\x00", 40)],
        "malformed",
        "more than 64",
    ),
    "descriptors_inside": ([(framed(HELLO)[:4], 1), (HELLO, 1)], "malformed", "first byte"),
    "never_finished": ([(framed(HELLO)[:2], 1)], "timeout", ""),
}
"""Bytes with so many descriptors each; the code and a part of the message of the error."""


@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_frame_is_refused_and_its_connection_closed_and_no_descriptor_leaks(
    serving: Serving, null_fd: int, num_open_fds: Callable[[], int], case: str
) -> None:
    parts, code, why = BROKEN[case]
    options = {"frame_timeout_s": 0.2} if code == "timeout" else {}
    before = num_open_fds()
    async with serving(**options) as recorded:
        with raw(recorded.server.path) as connected:
            for part, num_fds in parts:
                send_with_fds(connected, part, [null_fd] * num_fds)
            (reply,) = await replies_until_end(connected)
        await recorded.one_closed.wait()
        async with AttachClient(recorded.server.path) as other:
            assert await other.call({}) == {"seen": 0}

    assert reply["error"]["code"] == code
    assert why in reply["error"]["message"]
    assert len(recorded.closed) == 2
    assert recorded.server.counts.num_malformed == 1
    assert num_open_fds() == before


@pytest.mark.parametrize("num_bytes", [1, 4, 6])
async def test_a_client_that_dies_inside_a_message_leaves_nothing(
    serving: Serving, null_fd: int, num_open_fds: Callable[[], int], num_bytes: int
) -> None:
    before = num_open_fds()
    async with serving() as recorded:
        with raw(recorded.server.path) as connected:
            send_with_fds(connected, framed(b"\x81\xa1a\x01")[:num_bytes], [null_fd])
        await recorded.one_closed.wait()

    assert recorded.messages == []
    assert len(recorded.closed) == 1
    assert num_open_fds() == before


async def test_a_client_that_never_reads_or_never_finishes_stops_nobody_else(
    serving: Serving,
) -> None:
    async def long_answer(connection: Any, message: Any, fds: list[int]) -> dict[str, Any]:
        return {"text": "x" * 60_000}

    async with serving(on_message=long_answer) as recorded:
        path = recorded.server.path
        with raw(path) as silent, raw(path) as unfinished, raw(path) as idle:
            silent.send(framed(HELLO) * 1000)
            unfinished.send(b"\x05")
            async with AttachClient(path) as client:
                for _ in range(20):
                    await client.call({})
            assert idle.fileno() > 0

    assert len(recorded.closed) == 4


@settings(deadline=None, max_examples=num_examples(150))
@given(
    chunks=st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.binary(max_size=60).map(framed),
            st.dictionaries(st.text(max_size=5), st.integers(0, 9)).map(
                lambda message: framed(msgpack.packb(message))
            ),
        ),
        max_size=6,
    ),
    num_fds=st.integers(0, 70),
)
def test_no_bytes_whatever_stop_the_server_or_leak_a_descriptor(
    chunks: list[bytes], num_fds: int
) -> None:
    with TemporaryDirectory() as directory, Path(os.devnull).open() as null:
        before = len(list(Path("/proc/self/fd").iterdir()))
        path = Path(directory) / "attach.sock"
        num_left = anyio.run(throw_garbage, path, chunks, [null.fileno()] * num_fds)
        after = len(list(Path("/proc/self/fd").iterdir()))

    assert num_left == 2
    assert after == before


async def throw_garbage(path: Path, chunks: list[bytes], fds: list[int]) -> int:
    """Serve a client that sends them and one that behaves; return how many ends were reported."""
    ended: list[object] = []
    server = AttachServer(path, answer_fine, ended.append, frame_timeout_s=2)
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        with raw(server.path) as connected:
            pour(connected, chunks, fds)
            replies = await replies_until_end(connected)
        assert all(set(reply) in ({"ok"}, {"error"}) for reply in replies)
        async with AttachClient(server.path) as other:
            assert await other.call({}) == {"fine": 1}
        tasks.cancel_scope.cancel()
    return len(ended)


def pour(connected: socket.socket, chunks: list[bytes], fds: list[int]) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):
        for chunk in filter(None, chunks):
            send_with_fds(connected, chunk, fds) if fds else connected.sendall(chunk)
    connected.shutdown(socket.SHUT_WR)


async def answer_fine(*_: object) -> dict[str, Any]:
    return {"fine": 1}
