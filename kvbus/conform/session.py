"""Attach session of one engine process."""

import ctypes
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbus.conform.memory import RegionView
from kvbus.conform.rules import Book
from kvbus.protocol.engine import Register
from kvbus.protocol.message import Message

LENGTH_BYTES, MAX_BODY_BYTES, MAX_FDS = 4, 65_536, 64
_CREDENTIALS = struct.Struct("iII")
_PIDFD_GETFD = 438
_CLOEXEC = 0o2000000


class EngineSession:
    def __init__(self, accepted: socket.socket) -> None:
        self.closed = False
        self.boot, self.identity = "", b""
        self.secret: str | None = None
        self.ids: set[int] = set()
        self.last_seq = 0
        self.registered: Register | None = None
        self.segments: dict[str, mmap.mmap | None] = {}
        self.files: set[tuple[int, int]] = set()
        self.cells: memoryview | None = None
        self.places: list[RegionView] = []
        self._socket = accepted
        self._socket.setblocking(False)
        self._read, self._fds = bytearray(), list[int]()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._socket.close()
            close_all(self._fds)

    # Linux delivers descriptors with the read that takes the byte they were sent on. So the first
    # byte of a message is read alone, and no read crosses a message's end. Descriptors that arrive
    # with any other read were not on the first byte.
    def read(self, book: Book) -> tuple[bytes, list[int]] | None:
        """Return body and descriptors of the current message once complete.

        An oversized body is cut to one byte over the limit. The caller owns the descriptors.
        """
        try:
            chunk, fds, _, _ = socket.recv_fds(self._socket, self._num_missing(), MAX_FDS)
        except BlockingIOError:
            return None
        except OSError:
            chunk, fds = b"", []
        if not chunk:
            book.expect("attach.framing", not self._read, "the connection ended in a message")
            self.close()
            return None
        if fds:
            where = f"{len(fds)} descriptors came with byte {len(self._read)} of a message"
            book.expect("attach.first_byte", not self._read, where)
        self._read += chunk
        self._fds += fds
        if self._num_missing():
            return None
        whole = bytes(self._read[LENGTH_BYTES:]), self._fds
        self._read, self._fds = bytearray(), []
        return whole

    def write(self, packed: bytes, fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(
                self._socket, [len(packed).to_bytes(LENGTH_BYTES, "little") + packed], fds
            )
        except OSError:
            self.close()

    def _num_missing(self) -> int:
        if not self._read:
            return 1
        if len(self._read) < LENGTH_BYTES:
            return LENGTH_BYTES - len(self._read)
        length = int.from_bytes(self._read[:LENGTH_BYTES], "little")
        return LENGTH_BYTES + min(length, MAX_BODY_BYTES + 1) - len(self._read)

    def is_inherited(self) -> bool | None:
        """None if unknown."""
        credentials = self._socket.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid, _, _ = _CREDENTIALS.unpack(credentials)
        path = self._socket.getsockname()
        flags = [_flags(pid, fd) for fd in _sockets(pid) if _leads_to(pid, fd, path)]
        return any(not flag & _CLOEXEC for flag in flags) if flags else None


@dataclass(slots=True, eq=False)
class EngineRequest:
    """``body`` is None if it could not be parsed; ``taken`` means answered, or left to a scene."""

    session: EngineSession
    request_id: int
    op: str
    body: Message | None
    at: float
    taken: bool


def close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _flags(pid: int, fd: int) -> int:
    lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))


def _sockets(pid: int) -> list[int]:
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
        return [int(link.name) for link in links if link.readlink().name.startswith("socket:")]
    except OSError:
        return []


def _leads_to(pid: int, fd: int, path: str) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        copied = ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, fd, 0)
        if copied < 0:
            return False
        with socket.socket(fileno=copied) as theirs:
            return theirs.family == socket.AF_UNIX and theirs.getpeername() == path
    except OSError:
        return False
    finally:
        os.close(pidfd)
