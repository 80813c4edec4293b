"""Played agent: two sockets, default answers and notices, in one thread without an event loop.

It parses bytes itself, to check the documented protocol.
"""

import fcntl
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq

from kvbus.conform.engine_process import EngineCommand
from kvbus.conform.memory import RegionView, places_of
from kvbus.conform.rules import Book
from kvbus.conform.session import MAX_BODY_BYTES, EngineRequest, EngineSession, close_all
from kvbus.errors import (
    ConfigError,
    ErrorCode,
    GeometryError,
    KVBusError,
    LocalError,
    ProtocolError,
)
from kvbus.geometry import EngineSpec, validate_engine, validate_rank
from kvbus.protocol.attach import Hello, PassCuda, PassSegment
from kvbus.protocol.commit_cell import CELLS_BYTES
from kvbus.protocol.engine import AgentRole, AwaitReady, Detach, Ping, Register
from kvbus.protocol.envelope import (
    PROTOCOL_VERSION,
    RequestFrame,
    decode,
    encode_notice,
    unpack_map,
)
from kvbus.protocol.message import REQUESTS, Message, Socket, error_body, from_body

TICK_MS = 50
BACKLOG = 64
LOWEST_FIRST_ID, END_OF_FIRST_IDS = 1_000, 2**53
"""A random first id is too low once in 9e12 sessions."""
MAX_BOOT_CHARS = 64
WANTED_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK

Answer = Mapping[str, Any]
OK: Answer = {"ok": {}}


def refusal(code: str, message: str, **detail: str | int | float) -> Answer:
    return {"error": {"code": code, "message": message, "detail": detail}}


class PlayedAgent:
    """In ``answering``, None as an answer means later. Scenes answer the operations in ``held``."""

    def __init__(self, folder: Path, engine: EngineCommand, role: AgentRole, book: Book) -> None:
        self.role, self.engine, self.book = role, engine, book
        self.boot = ""
        self.silent = False
        self.held: set[str] = set()
        self.log: list[EngineRequest] = []
        self.answering: dict[str, Callable[[EngineRequest, Any], Answer | None]] = {
            Register.op: self._on_register,
            AwaitReady.op: lambda *_: {"ok": {"memory": "the ranks", "later": None}},
            Ping.op: lambda *_: OK,
            Detach.op: lambda *_: OK,
        }
        self._folder, self._num_boots = folder, 0
        self._context = zmq.Context()
        self._connections: list[EngineSession] = []
        self._used_boots: set[str] = set()

    def open(self) -> None:
        self._num_boots += 1
        self.boot = f"{self._num_boots:032x}"
        self._lifeline = list(os.pipe())
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.SNDHWM, 0)
        self._router.set(zmq.RCVHWM, 0)
        self._router.set(zmq.LINGER, 0)
        self._router.set(zmq.ROUTER_HANDOVER, 1)
        self._endpoint = f"ipc://{self._folder}/engine{self._num_boots}.sock"
        self._router.bind(self._endpoint)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = self.engine.attach_path
        try:
            self._listener.bind(str(path))
        except OSError as error:
            raise ConfigError(f"cannot listen at {path}: {error}") from error
        path.chmod(0o600)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)

    def close(self) -> None:
        """End like a killed process."""
        self.hang_up()
        self._listener.close()
        self.engine.attach_path.unlink()
        self._router.close()
        close_all(self._lifeline)

    def hang_up(self) -> None:
        for session in self._connections:
            session.close()
        self._connections.clear()

    def __enter__(self) -> "PlayedAgent":
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._context.term()

    @property
    def sessions(self) -> list[EngineSession]:
        return [one for one in self._connections if one.boot and not one.closed]

    @property
    def spec(self) -> EngineSpec | None:
        registered = (one.registered for one in self.sessions)
        return next((body.engine for body in registered if body), None)

    @property
    def places(self) -> list[RegionView]:
        return [place for session in self.sessions for place in session.places]

    @property
    def cells(self) -> memoryview | None:
        return next((one.cells for one in self.sessions if one.cells is not None), None)

    @property
    def files(self) -> set[tuple[int, int]]:
        """Device and inode of each mapped segment."""
        return {file for session in self.sessions for file in session.files}

    @property
    def is_complete(self) -> bool:
        bodies = [one.registered for one in self.sessions if one.registered]
        control = next((body for body in bodies if body.rank is None), None)
        if control is None:
            return False
        ranks = {body.rank.rank for body in bodies if body.rank}
        elsewhere = {rank for other in control.remote_ranks for rank in other.ranks}
        return ranks | elsewhere == set(range(control.engine.num_ranks))

    def until(self, condition: Callable[[], object], within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() >= deadline:
                return False
            self._step()
        return True

    def play(self, seconds: float) -> None:
        self.until(lambda: False, seconds)

    @contextmanager
    def holding(self, op: str) -> Iterator[None]:
        self.held.add(op)
        try:
            yield
        finally:
            self.held.discard(op)

    def answer(self, request: EngineRequest) -> None:
        request.taken = True
        answer: Answer | None = refusal("invalid", "the body is not as the page wants it")
        if request.body is not None:
            answer = self.answering[request.op](request, request.body)
        if answer is not None:
            self.reply(request, answer)

    def refuse(self, request: EngineRequest, code: str, **detail: str | int | float) -> None:
        self.reply(request, refusal(code, f"kvbus conform refuses with {code}", **detail))

    def reply(self, request: EngineRequest, answer: Answer) -> None:
        request.taken = True
        later = {"a_later_field": [1]}
        self._reply(request.session.identity, request.request_id, {**later, **answer})

    def notify(self, op: str, body: Message | Mapping[str, Any]) -> None:
        for session in self.sessions:
            if session.registered and session.registered.rank is None:
                session.last_seq += 1
                self._post(session.identity, encode_notice(op, session.last_seq, self.boot, body))

    def requests_of(self, op: str, since: int = 0) -> list[EngineRequest]:
        return [request for request in self.log[since:] if request.op == op]

    def _reply(self, identity: bytes, request_id: int, answer: Answer) -> None:
        fields = {"v": PROTOCOL_VERSION, "re": request_id, "boot": self.boot, **answer}
        self._post(identity, msgpack.packb(fields))

    def _post(self, identity: bytes, frame: bytes) -> None:
        if identity:
            self._router.send_multipart([identity, frame])

    def _step(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._listener, zmq.POLLIN)
        for session in self._connections:
            poller.register(session.fileno(), zmq.POLLIN)
        output = self.engine.fileno()
        if output is not None:
            poller.register(output, zmq.POLLIN)
        ready = dict(poller.poll(TICK_MS))
        if output in ready and not self.engine.on_readable():
            time.sleep(TICK_MS / 1000)  # at the end of its output it is always readable
        if self._listener.fileno() in ready:
            self._connections.append(EngineSession(self._listener.accept()[0]))
        for session in self._connections:
            if session.fileno() in ready and not self.silent:
                self._on_attach(session)
        self._connections = [one for one in self._connections if not one.closed]
        if self._router in ready:
            self._drain()
        self._answer_all()

    def _answer_all(self) -> None:
        while request := next(filter(self._may_answer, self.log), None):
            self.answer(request)

    def _may_answer(self, request: EngineRequest) -> bool:
        is_early = request.op == AwaitReady.op and not self.is_complete
        return not (request.taken or is_early or self.silent)

    # The attach socket.

    def _on_attach(self, session: EngineSession) -> None:
        whole = session.read(self.book)
        if whole is None:
            return
        packed, fds = whole
        had_boot = bool(session.boot)
        try:
            answer = {"ok": self._attach_answer(session, packed, fds)}
        except KVBusError as error:
            answer = {"error": error_body(error)}
        finally:
            close_all(fds)
        is_hello = session.boot and not had_boot
        session.write(msgpack.packb(answer), self._lifeline[:1] if is_hello else ())
        if len(packed) > MAX_BODY_BYTES:
            session.close()

    def _attach_answer(
        self, session: EngineSession, packed: bytes, fds: list[int]
    ) -> dict[str, Any]:
        with self.book.reading("attach.framing"):
            if len(packed) > MAX_BODY_BYTES:
                raise ProtocolError("a message of over 65,536 bytes", code=ErrorCode.TOO_LARGE)
            fields = unpack_map(packed)
        with self.book.reading("attach.messages"):
            op = fields.get("op")
            if op not in REQUESTS[Socket.ATTACH] or not isinstance(fields.get("body"), dict):
                raise ProtocolError(f"no such attach message: {op!r}", code=ErrorCode.UNKNOWN_OP)
            message = from_body(REQUESTS[Socket.ATTACH][op], fields["body"])
        if isinstance(message, Hello):
            return self._on_hello(session, message)
        if not self.book.expect("attach.hello", bool(session.boot), f"{op!r} before hello"):
            raise LocalError("send hello first", code=ErrorCode.NOT_REGISTERED)
        if isinstance(message, PassSegment):
            return self._on_segment(session, message, fds)
        if isinstance(message, PassCuda):
            session.segments[message.segment_id] = None
        return {}

    def _on_hello(self, session: EngineSession, hello: Hello) -> dict[str, Any]:
        versions = f"it speaks versions {hello.min_protocol} to {hello.max_protocol}"
        fits = hello.min_protocol <= PROTOCOL_VERSION <= hello.max_protocol
        self.book.expect("attach.hello", fits, versions)
        self.book.expect("attach.hello", not session.boot, "a second hello on a connection")
        is_new = hello.boot not in self._used_boots
        self.book.expect("attach.boot", is_new, f"boot id {hello.boot!r} was used before")
        length = f"a boot id of {len(hello.boot)} characters"
        self.book.expect("attach.boot", len(hello.boot) <= MAX_BOOT_CHARS, length)
        if not fits:
            raise LocalError(versions, code=ErrorCode.UNSUPPORTED_VERSION)
        if not is_new:
            raise LocalError("this boot id was used here", code=ErrorCode.STALE)
        self._used_boots.add(hello.boot)
        session.boot = hello.boot
        inherited = session.is_inherited()
        if inherited is None:
            self.book.untried("attach.inheritance", "the process's descriptors cannot be read")
        else:
            self.book.expect("attach.inheritance", not inherited, "it is open across an exec")
        return {
            "protocol": PROTOCOL_VERSION,
            "agent_id": "conform",
            "agent_boot": self.boot,
            "role": self.role.value,
            "engine_endpoint": self._endpoint,
            "peer_endpoint": "tcp://127.0.0.1:1",
            "events_endpoint": "tcp://127.0.0.1:1",
            "a_later_field": {"of": "a newer agent"},
        }

    def _on_segment(
        self, session: EngineSession, passed: PassSegment, fds: list[int]
    ) -> dict[str, Any]:
        name = passed.segment_id
        alone = f"{len(fds)} descriptors came with segment {name!r}"
        if not self.book.expect("attach.first_byte", len(fds) == 1, alone):
            raise LocalError(alone, code=ErrorCode.SEGMENT)
        status = os.fstat(fds[0])
        size = status.st_size
        differs = f"segment {name!r} has {size:,} bytes, `segment` states {passed.size_bytes:,}"
        if not self.book.expect("attach.size", size == passed.size_bytes, differs):
            raise LocalError(differs, code=ErrorCode.SEGMENT)
        mapped = mmap.mmap(fds[0], size)
        is_page = self.book.expect(
            "attach.size",
            passed.kind == "kv" or size == CELLS_BYTES,
            f"a page of {passed.kind} of {size:,} bytes",
        )
        if passed.kind == "kv":
            session.segments[name] = mapped
            session.files.add((status.st_dev, status.st_ino))
        elif passed.kind == "cells" and is_page:
            session.cells = memoryview(mapped).cast("Q")
        return {"sealed": self._check_seals(name, fds[0])}

    def _check_seals(self, name: str, fd: int) -> bool:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = fcntl.F_SEAL_SEAL
        if seals & WANTED_SEALS != WANTED_SEALS and seals & fcntl.F_SEAL_SEAL:
            self.book.untried("attach.seals", f"segment {name!r} is of a kind that has no seals")
            return False
        missing = f"segment {name!r} can still grow or shrink"
        return self.book.expect("attach.seals", seals & WANTED_SEALS == WANTED_SEALS, missing)

    # The engine socket.

    def _drain(self) -> None:
        while True:
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            several = f"a message of {len(frames)} frames"
            if not self.book.expect("frames.one", len(frames) == 1, several):
                frames = [frame for frame in frames if frame][-1:] or [b""]
            request = self._read_envelope(frames[0])
            if request is not None:
                self._on_request(identity, request)

    def _read_envelope(self, frame: bytes) -> RequestFrame | None:
        try:
            with self.book.reading("frames.maps"):
                fields = unpack_map(frame)
            with self.book.reading("frames.envelope"):
                envelope = decode(frame)
                if not isinstance(envelope, RequestFrame):
                    missing = {"v", "op", "id", "boot", "body"} - fields.keys()
                    lacks = ", ".join(sorted(missing))
                    raise ProtocolError(f"`{fields.get('op')}` is no request: it lacks {lacks}")
        except ProtocolError:
            return None
        return envelope

    def _on_request(self, identity: bytes, request: RequestFrame) -> None:
        body = self._read_body(request)
        session = next((one for one in self.sessions if one.boot == request.boot), None)
        known = f"`{request.op}` with boot id {request.boot!r}, which is not attached"
        # Messages of a session that has just ended may still arrive.
        was_attached = request.boot in self._used_boots
        self.book.expect("frames.boot", session is not None or was_attached, known)
        if session is None:
            self._reply(identity, request.request_id, refusal("stale", "this boot id has ended"))
            return
        self._check_secret(session, request.secret)
        session.identity = identity
        again = f"`{request.op}` with id {request.request_id} came again"
        is_new = request.request_id not in session.ids
        if self.book.expect("requests.once", is_new, again):
            self._check_id(session, request.request_id)
            held = request.op in self.held and body is not None
            number, op, now = request.request_id, request.op, time.monotonic()
            self.log.append(EngineRequest(session, number, op, body, now, taken=held))
            self._answer_all()

    def _read_body(self, request: RequestFrame) -> Message | None:
        kinds = REQUESTS[Socket.ENGINE] | REQUESTS[Socket(self.role)]
        try:
            with self.book.reading("frames.body"):
                if request.op not in kinds:
                    raise ProtocolError(f"a {self.role} agent knows no `{request.op}`")
                return from_body(kinds[request.op], request.body)
        except ProtocolError:
            return None

    def _check_secret(self, session: EngineSession, secret: str) -> None:
        if session.secret is None:
            shared = [one for one in self.sessions if secret and one.secret == secret]
            is_public = secret in {session.boot, self.boot}
            seen = "it is that of another session, or a boot id"
            self.book.expect("frames.secret", not shared and not is_public, seen)
            session.secret = secret
        changed = "a session that has one secret sends another, or none"
        self.book.expect("frames.secret", secret == session.secret, changed)

    def _check_id(self, session: EngineSession, request_id: int) -> None:
        if session.ids:
            rises, seen = request_id > max(session.ids), f"id {request_id} after {max(session.ids)}"
        else:
            rises = LOWEST_FIRST_ID <= request_id < END_OF_FIRST_IDS
            seen = f"a session starts with id {request_id}"
        self.book.expect("requests.ids", rises, seen)
        session.ids.add(request_id)

    def _on_register(self, request: EngineRequest, body: Register) -> Answer:
        session = request.session
        same = self.spec in (None, body.engine)
        self.book.expect("register.same_engine", same, "two sessions state different engines")
        first = session.registered is None
        self.book.expect("register.sessions", first, "a session registers twice")
        problem = _wrong_memory(body, session)
        if not self.book.expect("register.memory", not problem, problem):
            return refusal("geometry", problem)
        session.registered = body
        if body.rank is not None:
            session.places = places_of(body.engine, body.rank, session.segments)
        return OK


def _wrong_memory(body: Register, session: EngineSession) -> str:
    try:
        validate_engine(body.engine)
        if body.rank is not None:
            validate_rank(body.engine, body.rank)
    except GeometryError as error:
        return error.message
    for segment in body.rank.segments if body.rank else ():
        if segment.segment_id not in session.segments:
            return f"segment {segment.segment_id!r} was not passed"
        mapped = session.segments[segment.segment_id]
        if mapped is not None and len(mapped) != segment.size_bytes:
            return f"segment {segment.segment_id!r} has {len(mapped):,} bytes"
    return ""
