"""Connections and frames that the attach server refuses, while it goes on for the others.

Bodies that are no map of strings are among the frames of `tests/unit/vectors/attach.json`.
"""

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

from kvbus.errors import ErrorCode, RequestRefused
from kvbus.memory.attach import AttachClient
from tests.support.examples import num_examples
from tests.unit.memory.conftest import Serving, serve

NOBODY = 65534
HELLO = b"\x80"  # an empty map
LARGE = {"text": "x" * 60_000}
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@contextmanager
def raw(path: Path) -> Iterator[socket.socket]:
    """A C++ author's client: plain blocking calls."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(str(path))
        yield connected


def send_with_fds(connected: socket.socket, part: bytes, fds: list[int]) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    assert connected.sendmsg([part], [rights]) == len(part)


async def replies_until_end(connected: socket.socket) -> list[dict[str, Any]]:
    return await anyio.to_thread.run_sync(_replies_until_end, connected)


def _replies_until_end(connected: socket.socket) -> list[dict[str, Any]]:
    rest, replies = b"", []
    with suppress(ConnectionResetError):  # the end, when the server left bytes unread
        while chunk := connected.recv(65536):
            rest += chunk
    while rest:
        length = 4 + int.from_bytes(rest[:4], "little")
        replies.append(msgpack.unpackb(rest[4:length]))
        rest = rest[length:]
    return replies


@pytest.mark.anyio
@pytest.mark.usefixtures("nothing_leaks")
async def test_one_connection_too_many_is_told_that_the_agent_is_busy(serving: Serving) -> None:
    async with serving(max_connections=1) as served:
        async with AttachClient(served.path) as first:
            await first.call({})
            for _ in range(3):
                async with AttachClient(served.path) as second:
                    with pytest.raises(RequestRefused) as caught:
                        await second.call(LARGE)
            assert await first.call({}) == {"seen": 0}
        await served.one_closed.wait()
        async with AttachClient(served.path) as third:
            assert await third.call({}) == {"seen": 0}

    assert caught.value.code == ErrorCode.BUSY
    assert (served.server.num_refused, len(served.closed)) == (3, 2)


@pytest.mark.anyio
@as_root
async def test_another_user_is_refused(
    serving: Serving, child_command: Callable[..., list[str]]
) -> None:
    async with serving() as served:
        served.path.parent.chmod(0o755)
        served.path.chmod(0o666)
        result = await anyio.run_process(child_command("stranger", served.path))
    assert msgpack.unpackb(result.stdout[4:])["error"]["detail"] == {"uid": NOBODY}
    assert served.server.num_refused == 1
    assert (served.messages, served.closed) == ([], [])


@pytest.mark.anyio
@as_root
async def test_process_of_agents_effective_user_is_attached(folder: Path) -> None:
    os.chown(folder, NOBODY, -1)
    os.seteuid(NOBODY)
    try:
        async with serve(folder / "attach.sock"), AttachClient(folder / "attach.sock") as client:
            assert await client.call({}) == {"seen": 0}
    finally:
        os.seteuid(0)


TOO_LONG = (65_537).to_bytes(4, "little")
BROKEN: dict[str, tuple[list[tuple[bytes, int]], str, str]] = {
    "a_length_beyond_the_limit": ([(TOO_LONG, 1)], "too_large", ""),
    "too_many_descriptors": ([(framed(HELLO), 100)], "malformed", "more than 64"),
    "too_many_over_first_bytes": ([(b"\x01", 40), (b"\x00", 40)], "malformed", "more than 64"),
    "descriptors_inside": ([(framed(HELLO)[:4], 1), (HELLO, 1)], "malformed", "first byte"),
    "never_finished": ([(framed(HELLO)[:2], 1)], "timeout", ""),
}
"""Bytes with so many descriptors each; the code and a part of the message of the error."""


@pytest.mark.anyio
@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.usefixtures("nothing_leaks")
async def test_broken_frame_leaks_nothing(serving: Serving, null_fd: int, case: str) -> None:
    parts, code, why = BROKEN[case]
    async with serving(**({"frame_timeout_s": 0.2} if code == "timeout" else {})) as served:
        with raw(served.path) as connected:
            for part, num_fds in parts:
                send_with_fds(connected, part, [null_fd] * num_fds)
            (reply,) = await replies_until_end(connected)
        await served.one_closed.wait()
        async with AttachClient(served.path) as other:
            assert await other.call({}) == {"seen": 0}
    assert reply["error"]["code"] == code
    assert why in reply["error"]["message"]
    assert (len(served.closed), served.server.num_malformed) == (2, 1)


@pytest.mark.anyio
async def test_client_never_reading_or_finishing_stops_no_other(serving: Serving) -> None:
    async def long_answer(*_: object) -> dict[str, Any]:
        return LARGE

    async with serving(on_message=long_answer) as served:
        with raw(served.path) as silent, raw(served.path) as unfinished:
            silent.send(framed(HELLO) * 1000)
            unfinished.send(b"\x05")
            async with AttachClient(served.path) as client:
                for _ in range(20):
                    await client.call({})

    assert len(served.closed) == 3


chunks = st.one_of(
    st.binary(min_size=1, max_size=200),
    st.binary(max_size=60).map(framed),
    st.binary(min_size=1, max_size=60).map(lambda body: framed(body)[:-1]),
    st.dictionaries(st.text(max_size=5), st.integers(0, 9)).map(msgpack.packb).map(framed),
)


@settings(deadline=None, max_examples=num_examples(150))
@given(chunks=st.lists(chunks, max_size=6), num_fds=st.integers(0, 70))
def test_no_bytes_stop_the_server_or_leak_files(chunks: list[bytes], num_fds: int) -> None:
    with TemporaryDirectory() as directory, Path(os.devnull).open() as null:
        before = len(list(Path("/proc/self/fd").iterdir()))
        fds = [null.fileno()] * num_fds
        anyio.run(throw_garbage, Path(directory) / "attach.sock", chunks, fds)
        assert len(list(Path("/proc/self/fd").iterdir())) == before


async def throw_garbage(path: Path, chunks: list[bytes], fds: list[int]) -> None:
    async with serve(path, frame_timeout_s=2) as served:
        with raw(path) as connected:
            with suppress(BrokenPipeError, ConnectionResetError):
                for chunk in chunks:
                    send_with_fds(connected, chunk, fds) if fds else connected.sendall(chunk)
            connected.shutdown(socket.SHUT_WR)
            replies = await replies_until_end(connected)
        assert all(set(reply) in ({"ok"}, {"error"}) for reply in replies)
        async with AttachClient(path) as other:
            assert await other.call({}) == {"seen": 0}
    assert len(served.closed) == 2


@pytest.mark.anyio
async def test_batched_and_bytewise_messages_are_answered_in_order(
    serving: Serving, null_fd: int
) -> None:
    async with serving() as served:
        with raw(served.path) as connected:
            send_with_fds(connected, framed(HELLO) * 2, [null_fd, null_fd])
            send_with_fds(connected, framed(HELLO)[:1], [null_fd])
            for byte in framed(HELLO)[1:]:
                await anyio.wait_all_tasks_blocked()
                connected.send(bytes([byte]))
            connected.shutdown(socket.SHUT_WR)
            replies = await replies_until_end(connected)
    assert [reply["ok"]["seen"] for reply in replies] == [2, 0, 1]
