"""Attach messages as frames, with descriptors on a frame's first bytes."""

import array
import os
import socket
from collections.abc import Sequence
from typing import Any

import anyio
import msgpack

from kvbus.errors import ErrorCode, KVBusError, ProtocolError
from kvbus.protocol.envelope import MAX_PEER_ITEMS, unpack_map
from kvbus.protocol.message import error_body, refusal

LENGTH_BYTES = 4
MAX_BODY_BYTES = 65_536
MAX_FDS = 64
FRAME_TIMEOUT_S = 10.0
_FD_BYTES = array.array("i").itemsize
_CONTROL_BYTES = socket.CMSG_SPACE(MAX_FDS * _FD_BYTES)


def encode_frame(message: dict[str, Any]) -> bytes:
    try:
        body: bytes = msgpack.packb(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"an attach message cannot be encoded: {error}") from error
    return _checked(len(body)).to_bytes(LENGTH_BYTES, "little") + body


def encode_error(error: KVBusError) -> bytes:
    body = error_body(error)
    try:
        return encode_frame({"error": body})
    except ProtocolError:
        return encode_frame({"error": {**body, "detail": {}}})


def decode_length(header: bytes) -> int:
    return _checked(int.from_bytes(header, "little"))


def decode_body(body: bytes) -> dict[str, Any]:
    message = unpack_map(body, max_items=MAX_PEER_ITEMS)
    if not all(isinstance(key, str) for key in message):  # msgpack allows bin keys, too
        raise ProtocolError("an attach message must be a map with string keys")
    return message


def open_reply(reply: dict[str, Any]) -> dict[str, Any]:
    match reply:
        case {"ok": dict(answer)}:
            return answer
        case {"error": dict(body)}:
            raise refusal(body)
    raise ProtocolError("an attach reply holds neither 'ok' nor 'error'")


def _checked(num_bytes: int) -> int:
    if num_bytes > MAX_BODY_BYTES:
        raise ProtocolError(
            f"an attach message of {num_bytes} bytes exceeds {MAX_BODY_BYTES}",
            code=ErrorCode.TOO_LARGE,
            length_bytes=num_bytes,
        )
    return num_bytes


class FrameChannel:
    """For one receiver and one sender at a time."""

    def __init__(
        self, connected: socket.socket, *, frame_timeout_s: float = FRAME_TIMEOUT_S
    ) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._frame_timeout_s = frame_timeout_s

    @property
    def has_hung_up(self) -> bool:
        """True before the end-of-file is read, too."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def receive(self) -> tuple[bytes, list[int]]:
        """The caller closes the descriptors. ``frame_timeout_s`` begins with the frame.

        Raises ``anyio.EndOfStream``, ``ProtocolError``; either ends the channel.
        """
        await anyio.wait_readable(self._socket)
        fds: list[int] = []
        try:
            with anyio.fail_after(self._frame_timeout_s):
                return await self._receive_body(fds), fds
        except BaseException as error:
            close_fds(fds)
            if not isinstance(error, TimeoutError):
                raise
            raise ProtocolError(
                f"an attach message was not finished within {self._frame_timeout_s} s",
                code=ErrorCode.TIMEOUT,
            ) from error

    async def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send a whole frame; hang up if interrupted in the middle. Raises ``OSError``."""
        rest = memoryview(frame)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            while rest:
                try:
                    num_sent = self._socket.sendmsg([rest], ancillary)
                except BlockingIOError:
                    await anyio.wait_writable(self._socket)
                else:
                    rest, ancillary = rest[num_sent:], []
        except BaseException:
            if len(rest) < len(frame):
                self.shut_down()
            raise

    async def request(self, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """The caller closes the descriptors. No other task may wait for a reply."""
        await self.send(encode_frame(message))
        body, fds = await self.receive()
        try:
            return open_reply(decode_body(body)), fds
        except KVBusError:
            close_fds(fds)
            raise

    def shut_down(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side closed first
            return

    def close(self) -> None:
        """No task may wait on it."""
        self._socket.close()

    # The kernel keeps descriptors with the bytes that they were sent with. A read that continued
    # into the next message would receive its descriptors, too. So no read passes the end of the
    # frame: first the 4 bytes of the length, with which the descriptors come, then exactly the
    # body, with which none may come.
    #
    #     [len 4][body ........][len 4][body ...
    #      ^fds of this message  ^fds of the next
    async def _receive_body(self, fds: list[int]) -> bytes:
        header = await self._read(LENGTH_BYTES, fds)
        num_fds = len(fds)
        body = await self._read(decode_length(header), fds)
        if len(fds) != num_fds:
            raise ProtocolError("file descriptors must be on the first byte of their message")
        return body

    async def _read(self, num_bytes: int, fds: list[int]) -> bytes:
        read = bytearray()
        while len(read) < num_bytes:
            await anyio.wait_readable(self._socket)  # also yields to other connections
            try:
                chunk, ancillary, flags, _ = self._socket.recvmsg(
                    num_bytes - len(read), _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                continue
            except OSError as error:
                raise anyio.EndOfStream from error
            fds.extend(_passed_fds(ancillary))
            if flags & socket.MSG_CTRUNC or len(fds) > MAX_FDS:
                raise ProtocolError(
                    f"more than {MAX_FDS} file descriptors came with an attach message, or more "
                    "than this process may open"
                )
            if not chunk:
                raise anyio.EndOfStream
            read += chunk
        return bytes(read)


def close_fds(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _passed_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
    return list(fds)
