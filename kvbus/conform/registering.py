"""Answers what every engine asks of its agent: register, ready, ack, ping, detach."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvbus.conform.book import Book
from kvbus.conform.door import Door
from kvbus.conform.memory import EngineMemory
from kvbus.conform.sessions import Asked, Session
from kvbus.errors import GeometryError
from kvbus.geometry import validate_engine, validate_rank
from kvbus.protocol.engine import Acknowledge, AwaitReady, Detach, Ping, Register
from kvbus.protocol.message import Message

Answer = Mapping[str, Any]
"""``ok`` or ``error`` of a reply."""
Answering = Callable[[Asked], Answer | None]
"""None means: not yet."""

OK: Answer = {"ok": {}}
M = TypeVar("M", bound=Message)


def body_of(asked: Asked, kind: type[M]) -> M:
    """The body of a request, as the class that its operation has."""
    if not isinstance(asked.body, kind):
        raise TypeError(f"`{asked.op}` with a {type(asked.body).__name__}")
    return asked.body


def refusal(code: str, message: str, **detail: str | int | float) -> Answer:
    """An ``error``."""
    return {"error": {"code": code, "message": message, "detail": detail}}


class Registering:
    """What is known of the engine, from what its sessions register."""

    def __init__(self, door: Door, book: Book) -> None:
        self.memory: EngineMemory | None = None
        self.answering: dict[str, Answering] = {
            Register.op: self._on_register,
            AwaitReady.op: self._on_ready,
            Acknowledge.op: self._on_ack,
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

    def _on_ack(self, asked: Asked) -> Answer:
        body, outbox = body_of(asked, Acknowledge), asked.session.outbox
        if body.boot != self._door.welcome["agent_boot"]:
            return refusal("stale", "another boot's notices")
        early = f"acknowledges notice {body.upto} where {outbox.sent_upto} came"
        self._book.expect("notices.honest_ack", body.upto <= outbox.sent_upto, early)
        outbox.acknowledge(body.upto)
        return OK


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
