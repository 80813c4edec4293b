"""Owns the agent's side of one attach connection, read byte by byte as it comes.

Refuses nothing by itself: what is wrong goes into the book, and the connection goes on as long as
its bytes can be told apart.
"""

import array
import ctypes
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbus.conform.rules import Book
from kvbus.conform.wire import BadMapError, read_map, write_map

LENGTH_BYTES, MAX_BODY_BYTES, MAX_FDS = 4, 65_536, 64
_CREDENTIALS = struct.Struct("iII")
_PIDFD_GETFD = 438
_CLOEXEC = 0o2000000

OnMessage = Callable[["Connection", dict[str, Any], list[int]], dict[str, Any]]


class Connection:
    """One process of the engine; ``closed`` once either side has hung up."""

    def __init__(self, accepted: socket.socket, book: Book, on_message: OnMessage) -> None:
        accepted.setblocking(False)
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid: int = _CREDENTIALS.unpack(credentials)[0]
        self.boot = ""
        self.closed = False
        self._socket, self._book, self._on_message = accepted, book, on_message
        self._read, self._fds = bytearray(), list[int]()

    def fileno(self) -> int:
        """For a poller."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hang up; idempotent."""
        if not self.closed:
            self.closed = True
            self._socket.close()
            self._drop_fds()

    # Linux hands descriptors out with the read that takes the byte they were sent on. So the first
    # byte of a message is read alone, and never a byte beyond its end: descriptors that come with
    # any other read were not on the first byte.
    def on_readable(self) -> None:
        """Read what is there of the current message, and answer it when it is whole."""
        try:
            chunk, fds = self._receive(self._num_missing())
        except BlockingIOError:
            return
        except OSError:
            chunk, fds = b"", []
        if not chunk:
            self._book.expect("attach.framing", not self._read, "the connection ended in a message")
            self.close()
            return
        if fds:
            where = f"{len(fds)} descriptors came with byte {len(self._read)} of a message"
            self._book.expect("attach.first_byte", not self._read, where)
        self._read += chunk
        self._fds += fds
        if self._num_missing() == 0:
            self._finish()

    def _num_missing(self) -> int:
        if not self._read:
            return 1
        if len(self._read) < LENGTH_BYTES:
            return LENGTH_BYTES - len(self._read)
        length = int.from_bytes(self._read[:LENGTH_BYTES], "little")
        return LENGTH_BYTES + min(length, MAX_BODY_BYTES + 1) - len(self._read)

    def _receive(self, num_bytes: int) -> tuple[bytes, list[int]]:
        room = socket.CMSG_SPACE(MAX_FDS * 4)
        chunk, rights, _, _ = self._socket.recvmsg(num_bytes, room, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, payload in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(payload[: len(payload) - len(payload) % 4])
        return chunk, list(fds)

    def _finish(self) -> None:
        body = bytes(self._read[LENGTH_BYTES:])
        self._read.clear()
        try:
            fits = self._book.expect(
                "attach.framing", len(body) <= MAX_BODY_BYTES, "a message of over 65,536 bytes"
            )
            reply = self._reply(body) if fits else _refusal("too_large", "over 65,536 bytes")
        finally:
            self._drop_fds()
        packed = write_map(reply)
        try:
            self._socket.send(len(packed).to_bytes(LENGTH_BYTES, "little") + packed)
        except OSError:
            self.close()
        if not fits:
            self.close()

    def _reply(self, body: bytes) -> dict[str, Any]:
        try:
            message = read_map(body)
        except BadMapError as error:
            self._book.expect("attach.framing", False, str(error))
            return _refusal("malformed", str(error))
        return self._on_message(self, message, self._fds)

    def _drop_fds(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def is_inherited(self) -> bool | None:
        """Whether the process would pass its end on to what it executes; None when unknown."""
        path = self._socket.getsockname()
        flags = [
            fdinfo_flags(self.pid, fd)
            for fd in _unix_sockets(self.pid)
            if _names(self.pid, fd, path)
        ]
        return any(not flag & _CLOEXEC for flag in flags) if flags else None


def _refusal(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "detail": {}}}


def fdinfo_flags(pid: int, fd: int) -> int:
    """Flags of an open file of another process."""
    lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))


def _unix_sockets(pid: int) -> list[int]:
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
        return [int(link.name) for link in links if link.readlink().name.startswith("socket:")]
    except OSError:
        return []


def _names(pid: int, fd: int, path: str) -> bool:
    """Whether the other end of a process's socket is bound to this path."""
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
