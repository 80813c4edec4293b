"""Answers attach messages and what every engine asks of its agent, and looks at its memory."""

import fcntl
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

from kvbus.conform.attach import Connection
from kvbus.conform.frames import Asked, Session
from kvbus.conform.memory import EngineMemory
from kvbus.conform.rules import Book
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError, ProtocolError
from kvbus.geometry import validate_engine, validate_rank
from kvbus.protocol.attach import Hello, PassCuda, PassSegment
from kvbus.protocol.engine import AwaitReady, Detach, Ping, Register
from kvbus.protocol.envelope import PROTOCOL_VERSION, Body
from kvbus.protocol.message import M, error_body, from_body

WANTED_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
MAX_BOOT_CHARS = 64

Answer = Mapping[str, Any]
"""``ok`` or ``error`` of a reply."""
Answering = Callable[[Asked], Answer | None]
"""None means: not yet."""

OK: Answer = {"ok": {}}


def body_of(asked: Asked, kind: type[M]) -> M:
    """The body of a request, as the class that its operation has."""
    if not isinstance(asked.body, kind):
        raise TypeError(f"`{asked.op}` with a {type(asked.body).__name__}")
    return asked.body


def refusal(code: str, message: str, **detail: str | int | float) -> Answer:
    """An ``error``."""
    return {"error": {"code": code, "message": message, "detail": detail}}


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


class Registering:
    """What is known of the engine, from what its sessions register."""

    def __init__(self, door: Door, book: Book) -> None:
        self.memory: EngineMemory | None = None
        self.answering: dict[str, Answering] = {
            Register.op: self._on_register,
            AwaitReady.op: self._on_ready,
            Ping.op: lambda _: OK,
            Detach.op: lambda _: OK,
        }
        self._door, self._book = door, book

    @property
    def control(self) -> Session | None:
        """The control session, once it is registered."""
        return next((one for one in self._door.sessions.values() if one.is_control), None)

    @property
    def is_complete(self) -> bool:
        """Whether the control session and all ranks are registered."""
        control = self.control
        if control is None or control.registered is None:
            return False
        bodies = [one.registered for one in self._door.sessions.values() if one.registered]
        ranks = {body.rank.rank for body in bodies if body.rank}
        elsewhere = {rank for other in control.registered.others for rank in other.ranks}
        return ranks | elsewhere == set(range(control.registered.engine.num_ranks))

    def _on_register(self, asked: Asked) -> Answer:
        body, session = body_of(asked, Register), asked.session
        if self.memory is None:
            self.memory = EngineMemory(body.engine)
        same = "two sessions state different engines"
        self._book.expect("register.same_engine", body.engine == self.memory.engine, same)
        again = "a session registers twice"
        self._book.expect("register.sessions", session.registered is None, again)
        problem = _wrong_memory(body, session)
        if not self._book.expect("register.memory", not problem, problem):
            return refusal("geometry", problem)
        session.registered = body
        if body.rank is not None:
            self.memory.add_rank(body.rank, session.segments)
        return OK

    def _on_ready(self, _: Asked) -> Answer | None:
        return OK if self.is_complete else None


def _wrong_memory(body: Register, session: Session) -> str:
    try:
        validate_engine(body.engine)
        if body.rank is not None:
            validate_rank(body.engine, body.rank)
    except GeometryError as error:
        return error.message
    for segment in body.rank.segments if body.rank else ():
        mapped = session.segments.get(segment.segment_id)
        if mapped is None and segment.segment_id not in session.unmapped:
            return f"segment {segment.segment_id!r} was not passed"
        if mapped is not None and len(mapped) != segment.size_bytes:
            return f"segment {segment.segment_id!r} has {len(mapped):,} bytes"
    return ""
