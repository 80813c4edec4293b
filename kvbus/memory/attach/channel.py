"""Owns one connected attach socket: whole frames in and out, with the descriptors they carry.

Refuses descriptors that are not on a frame's first bytes, or too many of them; closes every
descriptor that it does not hand out. It never reads beyond the frame it is in: Linux then keeps
descriptors and the frame that they were sent with together.
"""

import array
import os
import socket
from collections.abc import Sequence

import anyio

from kvbus.errors import ErrorCode, ProtocolError
from kvbus.memory.attach import wire

_FD_BYTES = array.array("i").itemsize
_CONTROL_BYTES = socket.CMSG_SPACE(wire.MAX_FDS * _FD_BYTES)


class FrameChannel:
    """Frames over a connected Unix stream socket. One task receives, one at a time sends."""

    def __init__(self, connected: socket.socket, *, frame_timeout_s: float = 10.0) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._frame_timeout_s = frame_timeout_s

    async def receive(self) -> tuple[bytes, list[int]]:
        """Wait for a frame as long as it takes, and for its rest no longer than the deadline.

        Gives the body, and the descriptors that came with it, which are the caller's to close.
        Raises ``anyio.EndOfStream`` when the other side is gone, a frame unfinished or not, and
        ``ProtocolError`` when it broke the format: nothing further can be read then.
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
        """Send a whole frame; interrupted half-way, the channel is useless and hung up.

        Raises ``OSError`` when the other side is gone or a descriptor cannot be passed.
        """
        rest = memoryview(frame)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            while rest:
                try:
                    num_sent = self._socket.sendmsg([rest], rights)
                except BlockingIOError:
                    await anyio.wait_writable(self._socket)
                else:
                    rest, rights = rest[num_sent:], []
        except BaseException:
            if len(rest) < len(frame):
                self.hang_up()
            raise

    def hang_up(self) -> None:
        """Make both sides see end-of-file; idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side was faster
            return

    def close(self) -> None:
        """Close the socket; idempotent. No task may wait on it."""
        self._socket.close()

    # The kernel keeps descriptors with the bytes that they were sent with, but a read that goes on
    # into the next message would bring that one's descriptors along. So nothing is read beyond the
    # end of the frame: first the 4 bytes of the length, with which the descriptors come, then
    # exactly the body, with which none may come.
    #
    #     [len 4][body ........][len 4][body ...
    #      ^fds of this message  ^fds of the next
    async def _receive_body(self, fds: list[int]) -> bytes:
        header = await self._read(wire.LENGTH_BYTES, fds)
        num_fds = len(fds)
        body = await self._read(wire.decode_length(header), fds)
        if len(fds) != num_fds:
            raise ProtocolError("file descriptors must be on the first byte of their message")
        return body

    async def _read(self, num_bytes: int, fds: list[int]) -> bytes:
        read = bytearray()
        while len(read) < num_bytes:
            await anyio.wait_readable(self._socket)  # also lets other connections have their turn
            chunk = self._read_some(num_bytes - len(read), fds)
            if chunk is not None:
                read += chunk
        return bytes(read)

    def _read_some(self, num_bytes: int, fds: list[int]) -> bytes | None:
        try:
            chunk, ancillary, flags, _ = self._socket.recvmsg(
                num_bytes, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise anyio.EndOfStream from error
        fds.extend(_passed_fds(ancillary))
        if flags & socket.MSG_CTRUNC or len(fds) > wire.MAX_FDS:
            raise ProtocolError(
                f"more than {wire.MAX_FDS} file descriptors came with an attach message, or more "
                "than this process may open"
            )
        if not chunk:
            raise anyio.EndOfStream
        return chunk


def close_fds(fds: list[int]) -> None:
    """Close and forget all; those that were taken out of the list are not in it."""
    while fds:
        os.close(fds.pop())


def _passed_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
    return list(fds)
