"""Reads frames of the engine socket as strictly as the page says, and what sessions have sent.

What is wrong with a frame goes into the book.
"""

import mmap
from dataclasses import dataclass, field
from typing import Any

from kvbus.conform.attach import Connection
from kvbus.conform.rules import Book
from kvbus.conform.wire import BadMapError, read_map
from kvbus.errors import ProtocolError
from kvbus.protocol.engine import AgentRole, Register
from kvbus.protocol.envelope import RequestFrame, decode
from kvbus.protocol.message import REQUESTS, Message, Socket, from_body

KEYS = {"v", "op", "id", "boot", "body"}


@dataclass(slots=True, eq=False)
class Asked:
    """One request: ``taken`` once it was looked at, and ``answered`` once there is a reply."""

    session: "Session"
    request_id: int
    op: str
    body: Message
    at: float
    taken: bool = False
    answered: bool = False

    def reply_fields(self, boot: str, **answer: Any) -> dict[str, Any]:
        """The envelope of a reply, with a field that no version has."""
        return {"v": 1, "re": self.request_id, "boot": boot, "a_later_field": [1], **answer}


@dataclass(slots=True, eq=False)
class Session:
    """One process of the engine, from its `hello` on."""

    boot: str
    connection: Connection
    identity: bytes = b""
    secret: str | None = None
    last_id: int | None = None
    last_seq: int = 0
    ids: set[int] = field(default_factory=set)
    registered: Register | None = None
    segments: dict[str, mmap.mmap] = field(default_factory=dict)
    files: set[tuple[int, int]] = field(default_factory=set)
    unmapped: set[str] = field(default_factory=set)

    @property
    def is_control(self) -> bool:
        """Whether this is the session that offers and fetches."""
        return self.registered is not None and self.registered.rank is None

    @property
    def wants_fetched(self) -> bool:
        """Whether it is that of a rank which is told how each fetch ended."""
        return self.registered is not None and not self.is_control and self.registered.notices


@dataclass(frozen=True, slots=True)
class ReadFrame:
    """A request as it came, and its body if that could be read."""

    request: RequestFrame
    body: Message | None
    problem: str


def read_request(frames: list[bytes], role: AgentRole, book: Book) -> ReadFrame | None:
    """The request; None when it has none that could be answered."""
    if not book.expect("frames.one", len(frames) == 1, f"a message of {len(frames)} frames"):
        frames = [frame for frame in frames if frame][-1:] or [b""]
    try:
        fields = read_map(frames[0])
    except BadMapError as error:
        book.expect("frames.maps", False, str(error))
        return None
    book.expect("frames.maps", True, "")
    missing = ", ".join(sorted(KEYS - fields.keys()))
    try:
        request = decode(frames[0])
    except ProtocolError as error:
        book.expect("frames.envelope", False, f"{_op(fields)}{error.message}")
        return None
    if not isinstance(request, RequestFrame):
        book.expect("frames.envelope", False, f"not a request: it lacks {missing}")
        return None
    book.expect("frames.envelope", True, "")
    return _read_body(request, role, book)


def _read_body(request: RequestFrame, role: AgentRole, book: Book) -> ReadFrame:
    kinds = REQUESTS[Socket.ENGINE] | REQUESTS[Socket(role)]
    if request.op not in kinds:
        problem = f"a {role} agent knows no `{request.op}`"
        book.expect("frames.body", False, problem)
        return ReadFrame(request, None, problem)
    try:
        body = from_body(kinds[request.op], request.body)
    except ProtocolError as error:
        book.expect("frames.body", False, error.message)
        return ReadFrame(request, None, error.message)
    book.expect("frames.body", True, "")
    return ReadFrame(request, body, "")


def _op(fields: dict[str, Any]) -> str:
    op = fields.get("op")
    return f"`{op}`: " if isinstance(op, str) else ""
