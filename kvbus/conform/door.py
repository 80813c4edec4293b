"""Answers attach messages as an agent does, and looks at the memory that they pass."""

import fcntl
import mmap
import os
from typing import Any

from kvbus.conform.attach import Connection
from kvbus.conform.book import Book
from kvbus.conform.sessions import Session
from kvbus.errors import ErrorCode, KVBusError, LocalError, ProtocolError
from kvbus.protocol.attach import Hello, PassCuda, PassSegment
from kvbus.protocol.envelope import PROTOCOL_VERSION, Body
from kvbus.protocol.message import M, error_body, from_body

WANTED_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
MAX_BOOT_CHARS = 64


class Door:
    """The attach side of the agent: sessions by boot id."""

    def __init__(self, book: Book) -> None:
        self.sessions: dict[str, Session] = {}
        self.welcome: dict[str, Any] = {}
        self._book = book
        self._used_boots: set[str] = set()

    def was_used(self, boot: str) -> bool:
        """Whether a process said hello with this boot id, be it gone or not."""
        return boot in self._used_boots

    def answer(
        self, connection: Connection, message: dict[str, Any], fds: list[int]
    ) -> dict[str, Any]:
        """The reply to one message."""
        op, body = message.get("op"), message.get("body")
        try:
            if not isinstance(body, dict):
                raise ProtocolError("an attach message has a map as its body")
            if op == Hello.op:
                return {"ok": self._hello(connection, self._read(Hello, body))}
            session = self.sessions.get(connection.boot)
            if not self._book.expect("attach.hello", session is not None, f"{op!r} before hello"):
                raise LocalError("say hello first", code=ErrorCode.NOT_REGISTERED)
            if op == PassSegment.op and session:
                return {"ok": self._segment(session, self._read(PassSegment, body), fds)}
            if op == PassCuda.op and session:
                session.unmapped.add(self._read(PassCuda, body).segment_id)
                return {"ok": {}}
            self._book.expect("attach.messages", False, f"no such attach message: {op!r}")
            raise LocalError(f"unknown attach message {op!r}", code=ErrorCode.UNKNOWN_OP)
        except KVBusError as error:
            return {"error": error_body(error)}

    def _read(self, kind: type[M], body: Body) -> M:
        try:
            message = from_body(kind, body)
        except ProtocolError as error:
            self._book.expect("attach.messages", False, error.message)
            raise
        self._book.expect("attach.messages", True, "")
        return message

    def _hello(self, connection: Connection, hello: Hello) -> dict[str, Any]:
        versions = f"it speaks versions {hello.min_protocol} to {hello.max_protocol}"
        fits = hello.min_protocol <= PROTOCOL_VERSION <= hello.max_protocol
        self._book.expect("attach.hello", fits, versions)
        self._book.expect("attach.hello", not connection.boot, "a second hello on a connection")
        is_new = hello.boot not in self._used_boots
        self._book.expect("attach.boot", is_new, f"boot id {hello.boot!r} was used before")
        length = f"a boot id of {len(hello.boot)} characters"
        self._book.expect("attach.boot", len(hello.boot) <= MAX_BOOT_CHARS, length)
        if not fits:
            raise LocalError(versions, code=ErrorCode.UNSUPPORTED_VERSION)
        if not is_new:
            raise LocalError("this boot id was used here", code=ErrorCode.STALE)
        self._used_boots.add(hello.boot)
        connection.boot = hello.boot
        self.sessions[hello.boot] = Session(hello.boot, connection)
        inherited = connection.is_inherited()
        if inherited is None:
            self._book.untried("attach.inheritance", "the process's files cannot be looked at")
        else:
            self._book.expect("attach.inheritance", not inherited, "it is open across an exec")
        return self.welcome

    def _segment(self, session: Session, passed: PassSegment, fds: list[int]) -> dict[str, Any]:
        name = passed.segment_id
        alone = f"{len(fds)} descriptors came with segment {name!r}"
        if not self._book.expect("attach.first_byte", len(fds) == 1, alone):
            raise LocalError(alone, code=ErrorCode.SEGMENT)
        status = os.fstat(fds[0])
        size = status.st_size
        differs = f"segment {name!r} has {size:,} bytes, `segment` says {passed.size_bytes:,}"
        if not self._book.expect("attach.size", size == passed.size_bytes, differs):
            raise LocalError(differs, code=ErrorCode.SEGMENT)
        sealed = self._look_at_seals(name, fds[0])
        session.segments[name] = mmap.mmap(fds[0], size)
        session.files.add((status.st_dev, status.st_ino))
        return {"sealed": sealed}

    def _look_at_seals(self, name: str, fd: int) -> bool:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = fcntl.F_SEAL_SEAL
        if seals & WANTED_SEALS != WANTED_SEALS and seals & fcntl.F_SEAL_SEAL:
            self._book.untried("attach.seals", f"segment {name!r} is of a kind that has no seals")
            return False
        missing = f"segment {name!r} can still grow or shrink"
        return self._book.expect("attach.seals", seals & WANTED_SEALS == WANTED_SEALS, missing)
