"""Channel of messages and file descriptors between two processes of one agent."""

import array
import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Generic, TypeVar

import msgspec

from kvbus.data.messages import FromData, ToData
from kvbus.errors import ClosedError, ProtocolError

FRAME_BYTES, FRAME_FDS = 64 << 10, 64
MAX_MESSAGE_BYTES, MAX_MESSAGE_FDS = 256 << 20, 4096
MAX_UNSENT_BYTES = 512 << 20
_BUFFER_BYTES = 4 << 20
_LAST, _MORE = b"\0", b"\1"

S = TypeVar("S")
R = TypeVar("R")


class Channel(Generic[S, R]):
    """Messages are trusted."""

    def __init__(self, sock: socket.socket, receives: object) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._lock = Lock()
        self._unsent: deque[tuple[bytes, Sequence[int]]] = deque()
        self._unsent_bytes = 0
        self._parts, self._fds = list[bytes](), list[int]()
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: S, fds: Sequence[int] = ()) -> None:
        """Send from any thread without blocking; unsent frames are kept. Raises `ClosedError`."""
        frames = list(_frames(self._encoder.encode(message), fds))
        with self._lock:
            for number, (frame, some) in enumerate(frames):
                if self._unsent or not self._try_send(frame, some):
                    self._keep(frames[number:])
                    return

    def flush(self) -> None:
        with self._lock:
            while self._unsent:
                frame, fds = self._unsent[0]
                if not self._try_send(frame, fds):
                    return
                self._unsent.popleft()
                self._unsent_bytes -= len(frame)
                _close(fds)

    def receive(self) -> tuple[R, list[int]] | None:
        """The caller owns the descriptors. Raises `ClosedError`, `ProtocolError`."""
        while True:
            try:
                frame, fds, flags, _ = socket.recv_fds(self._sock, FRAME_BYTES + 1, FRAME_FDS)
            except BlockingIOError:
                return None
            except ConnectionResetError:  # reported once if the peer left data unread
                continue  # sent data follows, then the end
            except OSError as error:
                raise ClosedError(f"the channel is broken: {error.strerror}") from error
            if not frame:
                raise ClosedError("the other process has closed the channel")
            self._parts.append(frame[1:])
            self._fds += fds
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError("a frame was truncated: no descriptor was left for it")
            if frame[:1] == _MORE:
                continue
            body, self._parts = b"".join(self._parts), []
            fds, self._fds = self._fds, []
            return self._decoder.decode(body), fds

    def close(self) -> None:
        self._sock.close()
        _close(self._fds)
        for _, fds in self._unsent:
            _close(fds)
        self._unsent.clear()

    def _try_send(self, frame: bytes, fds: Sequence[int]) -> bool:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([frame], ancillary)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # until the peer receives queued descriptors
                return False
            raise ClosedError(f"the channel is broken: {error.strerror}") from error
        return True

    def _keep(self, frames: Sequence[tuple[bytes, Sequence[int]]]) -> None:
        for frame, fds in frames:
            kept: list[int] = []
            self._unsent.append((frame, kept))
            self._unsent_bytes += len(frame)
            try:
                kept.extend(map(os.dup, fds))  # the caller closes its own
            except OSError as error:
                raise ClosedError(f"cannot keep {len(fds)} files: {error.strerror}") from error
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            raise ClosedError(f"the other process has not read {self._unsent_bytes} bytes")


def channel_to_data(sock: socket.socket) -> "Channel[ToData, FromData]":
    return Channel(sock, FromData)


def channel_to_control(sock: socket.socket) -> "Channel[FromData, ToData]":
    return Channel(sock, ToData)


def _frames(body: bytes, fds: Sequence[int]) -> Iterator[tuple[bytes, Sequence[int]]]:
    if len(body) > MAX_MESSAGE_BYTES or len(fds) > MAX_MESSAGE_FDS:
        raise ProtocolError(f"a message of {len(body)} bytes and {len(fds)} descriptors")
    by_bytes, by_fds = -(-len(body) // FRAME_BYTES), -(-len(fds) // FRAME_FDS)
    num_frames = max(1, by_bytes, by_fds)
    for number in range(num_frames):
        part = body[number * FRAME_BYTES : (number + 1) * FRAME_BYTES]
        flag = _LAST if number == num_frames - 1 else _MORE
        yield flag + part, fds[number * FRAME_FDS : (number + 1) * FRAME_FDS]


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
