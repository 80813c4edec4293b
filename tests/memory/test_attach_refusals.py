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

pytestmark = pytest.mark.anyio
Serving = Callable[..., Any]
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


@pytest.fixture
def null_fd() -> Any:
    fd = os.open(os.devnull, os.O_RDONLY)
    yield fd
    os.close(fd)


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


async def broken_frame_is_refused(
    serving: Serving, num_open_fds: Callable[[], int], send: Callable[[socket.socket], None]
) -> dict[str, Any]:
    """Send it, and return the error, after which the connection and all descriptors are closed."""
    before = num_open_fds()
    async with serving() as recorded:
        with raw(recorded.server.path) as connected:
            send(connected)
            (reply,) = await replies_until_end(connected)
        await recorded.one_closed.wait()
        async with AttachClient(recorded.server.path) as other:
            assert await other.call({}) == {"seen": 0}
    assert len(recorded.closed) == 2
    assert recorded.server.counts.num_malformed == 1
    assert num_open_fds() == before
    error: dict[str, Any] = reply["error"]
    return error


async def test_a_length_beyond_the_limit_is_refused_and_closed(
    serving: Serving, null_fd: int, num_open_fds: Callable[[], int]
) -> None:
    def send(connected: socket.socket) -> None:
        send_with_fds(connected, (65_537).to_bytes(4, "little"), [null_fd])

    error = await broken_frame_is_refused(serving, num_open_fds, send)

    assert error["code"] == "too_large"


async def test_more_descriptors_than_a_message_may_carry_are_refused_and_none_leaks(
    serving: Serving, null_fd: int, num_open_fds: Callable[[], int]
) -> None:
    def send(connected: socket.socket) -> None:
        send_with_fds(connected, framed(HELLO), [null_fd] * 100)

    error = await broken_frame_is_refused(serving, num_open_fds, send)

    assert "more than 64" in error["message"]


async def test_descriptors_spread_over_a_messages_first_bytes_are_counted_together(
    serving: Serving, null_fd: int, num_open_fds: Callable[[], int]
) -> None:
    def send(connected: socket.socket) -> None:
        send_with_fds(connected, b"\x01", [null_fd] * 40)
        send_with_fds(connected, b"\x00", [null_fd] * 40)

    error = await broken_frame_is_refused(serving, num_open_fds, send)

    assert "more than 64" in error["message"]


async def test_descriptors_inside_a_message_are_refused_and_none_leaks(
    serving: Serving, null_fd: int, num_open_fds: Callable[[], int]
) -> None:
    def send(connected: socket.socket) -> None:
        send_with_fds(connected, framed(HELLO)[:4], [null_fd])
        send_with_fds(connected, HELLO, [null_fd])

    error = await broken_frame_is_refused(serving, num_open_fds, send)

    assert "first byte" in error["message"]


async def test_a_message_that_is_never_finished_is_refused_at_its_deadline(
    serving: Serving, null_fd: int, num_open_fds: Callable[[], int]
) -> None:
    def send(connected: socket.socket) -> None:
        send_with_fds(connected, framed(HELLO)[:2], [null_fd])

    def serving_impatiently() -> Any:
        return serving(frame_timeout_s=0.2)

    error = await broken_frame_is_refused(serving_impatiently, num_open_fds, send)

    assert error["code"] == "timeout"


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
