"""Plays an agent: its two sockets, what it answers unless it is told otherwise, its notices.

One thread, no event loop: everything happens inside `until`, which scenes call while they wait.
It speaks the engine socket with raw frames, as what it has to check is whether the engine keeps to
the page, and not to how this project's own agents happen to read it.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from kvbus.conform.attach import Connection
from kvbus.conform.door import Answer, Door, Registering, refusal
from kvbus.conform.engine_process import EngineProcess
from kvbus.conform.frames import Asked, ReadFrame, Session, read_request
from kvbus.conform.rules import Book
from kvbus.conform.wire import write_map
from kvbus.errors import ConfigError
from kvbus.protocol.engine import AgentRole, AwaitReady, Fetched, Ping
from kvbus.protocol.envelope import Body, encode_notice
from kvbus.protocol.message import Message

TICK_MS = 50
BACKLOG = 64
LOWEST_FIRST_ID, END_OF_FIRST_IDS = 1_000, 2**53
"""A random number below the latter is below the former once in nine million million sessions."""


class PlayedAgent:
    """An agent of this role at ``folder``; ``held`` are operations that are not answered by itself.

    ``answering`` has what answers each operation.
    """

    def __init__(self, folder: Path, role: AgentRole, book: Book) -> None:
        self.attach_path = folder / "attach.sock"
        self.role, self.book = role, book
        self.boot = ""
        self.silent = False
        self.held: set[str] = set()
        self.log: list[Asked] = []
        self.engine: EngineProcess | None = None
        self._folder, self._num_boots = folder, 0
        self._context = zmq.Context()
        self._door = Door(book)
        self.registering = Registering(self._door, book)
        self.answering = self.registering.answering
        self._connections: list[Connection] = []

    def open(self) -> None:
        """Come up as a new process of the agent."""
        self._num_boots += 1
        self.boot = f"{self._num_boots:032x}"
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.SNDHWM, 0)
        self._router.set(zmq.RCVHWM, 0)
        self._router.set(zmq.LINGER, 0)
        self._router.set(zmq.ROUTER_HANDOVER, 1)
        endpoint = f"ipc://{self._folder}/engine{self._num_boots}.sock"
        self._router.bind(endpoint)
        self._door.welcome = {
            "protocol": 1,
            "agent_id": "conform",
            "agent_boot": self.boot,
            "role": self.role.value,
            "engine_endpoint": endpoint,
            "peer_endpoint": "tcp://127.0.0.1:1",
            "events_endpoint": "tcp://127.0.0.1:1",
            "a_later_field": {"of": "a newer agent"},
        }
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(self.attach_path))
        except OSError as error:
            raise ConfigError(f"cannot listen at {self.attach_path}: {error}") from error
        self.attach_path.chmod(0o600)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)

    def close(self) -> None:
        """Go away as a process does that is killed."""
        self.hang_up()
        self._listener.close()
        self.attach_path.unlink()
        self._router.close()

    def hang_up(self) -> None:
        """End all attach connections, and so all sessions."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._door.sessions.clear()
        self.registering.memory = None

    def __enter__(self) -> "PlayedAgent":
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._context.term()

    @property
    def sessions(self) -> list[Session]:
        """Those of the engine's processes that are attached now."""
        return list(self._door.sessions.values())

    @property
    def files(self) -> set[tuple[int, int]]:
        """The files of all segments that are mapped now."""
        return {file for session in self.sessions for file in session.files}

    def until(self, condition: Callable[[], object], within_s: float) -> bool:
        """Play on until the condition holds; False when it does not in time."""
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() >= deadline:
                return False
            self._step()
        return True

    def play(self, seconds: float) -> None:
        """Play on for so long."""
        self.until(lambda: False, seconds)

    @contextmanager
    def holding(self, op: str) -> Iterator[None]:
        """Do not answer this operation within the block."""
        self.held.add(op)
        try:
            yield
        finally:
            self.held.discard(op)

    def answer(self, asked: Asked) -> None:
        """Take a request, as it would have been if it was held; its answer may come later."""
        asked.taken = True
        answer = self.answering[asked.op](asked)
        if answer is not None:
            self.reply(asked, answer)

    def refuse(self, asked: Asked, code: str, **detail: str | int | float) -> None:
        """Answer with an error."""
        self.reply(asked, refusal(code, f"kvbus conform says {code}", **detail))

    def reply(self, asked: Asked, answer: Answer) -> None:
        """Send the one answer to a request."""
        asked.taken = asked.answered = True
        self._post(asked.session, write_map(asked.reply_fields(self.boot, **answer)))

    def notify(self, op: str, body: Message | Body) -> None:
        """Send a notice to the control session."""
        control = self.registering.control
        if control is not None:
            self._notify(control, op, body)

    def notify_ranks(self, fetched: Fetched) -> None:
        """Tell the sessions of ranks that want to know how fetches end."""
        for session in self.sessions:
            if session.wants_fetched:
                self._notify(session, fetched.op, fetched)

    def asked(self, op: str, since: int = 0) -> list[Asked]:
        """The requests of this operation, those behind the first ``since`` requests of all."""
        return [asked for asked in self.log[since:] if asked.op == op]

    def _notify(self, session: Session, op: str, body: Message | Body) -> None:
        session.last_seq += 1
        self._post(session, encode_notice(op, session.last_seq, self.boot, body))

    def _post(self, session: Session, frame: bytes) -> None:
        if session.identity:
            self._router.send_multipart([session.identity, frame])

    def _step(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._listener, zmq.POLLIN)
        for connection in self._connections:
            poller.register(connection.fileno(), zmq.POLLIN)
        output = self.engine.fileno() if self.engine else None
        if output is not None:
            poller.register(output, zmq.POLLIN)
        ready = dict(poller.poll(TICK_MS))
        if output in ready and self.engine and not self.engine.on_readable():
            time.sleep(TICK_MS / 1000)  # at the end of its output it is always readable
        if self._listener.fileno() in ready:
            accepted, _ = self._listener.accept()
            self._connections.append(Connection(accepted, self.book, self._door.answer))
        for connection in self._connections:
            if connection.fileno() in ready and not self.silent:
                connection.on_readable()
        self._sweep()
        if self._router in ready:
            self._drain()

    def _sweep(self) -> None:
        for connection in self._connections:
            if connection.closed:
                self._door.sessions.pop(connection.boot, None)
        self._connections = [one for one in self._connections if not one.closed]

    def _drain(self) -> None:
        while True:
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            read = read_request(frames, self.role, self.book)
            if read is not None:
                self._on_request(identity, read)

    def _on_request(self, identity: bytes, read: ReadFrame) -> None:
        request = read.request
        session = self._door.sessions.get(request.boot)
        known = f"`{request.op}` with boot id {request.boot!r}, which is not attached"
        if session is None:
            # One that has just ended may still have messages on their way.
            self.book.expect("frames.boot", self._door.was_used(request.boot), known)
            answer = refusal("stale", "this boot id has ended")
            fields = {"v": 1, "re": request.request_id, "boot": self.boot, **answer}
            self._router.send_multipart([identity, write_map(fields)])
            return
        self.book.expect("frames.boot", True, known)
        self._look_at_secret(session, request.secret)
        session.identity = identity
        again = f"`{request.op}` with id {request.request_id} came again"
        is_new = request.request_id not in session.ids
        if not self.book.expect("requests.once", is_new, again):
            return
        asked = self._take_note(session, read)
        if read.body is None:
            self.refuse(asked, "invalid")
        elif asked.op not in self.held and not self.silent:
            self.answer(asked)
            self._answer_ready()

    def _look_at_secret(self, session: Session, secret: str) -> None:
        if session.secret is None:
            shared = [one for one in self.sessions if secret and one.secret == secret]
            told = secret in {session.boot, self.boot}
            seen = "it is that of another session, or a boot id"
            self.book.expect("frames.secret", not shared and not told, seen)
            session.secret = secret
        changed = "a session that has one secret sends another, or none"
        self.book.expect("frames.secret", secret == session.secret, changed)

    def _take_note(self, session: Session, read: ReadFrame) -> Asked:
        request = read.request
        if session.last_id is None:
            first = f"a session starts with id {request.request_id}"
            is_random = LOWEST_FIRST_ID <= request.request_id < END_OF_FIRST_IDS
            self.book.expect("requests.ids", is_random, first)
        else:
            rises = f"id {request.request_id} after {session.last_id}"
            self.book.expect("requests.ids", request.request_id > session.last_id, rises)
        session.last_id = max(session.last_id or 0, request.request_id)
        session.ids.add(request.request_id)
        body = read.body or Ping()
        asked = Asked(session, request.request_id, request.op, body, time.monotonic())
        self.log.append(asked)
        return asked

    def _answer_ready(self) -> None:
        for asked in self.log:
            if asked.op == AwaitReady.op and not asked.answered and self.registering.is_complete:
                self.answer(asked)

    def answer_silence(self) -> None:
        """Go on after a silence: what came meanwhile is answered now."""
        self.silent = False
        for asked in self.log:
            if not asked.taken and asked.op not in self.held:
                self.answer(asked)
