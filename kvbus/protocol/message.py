"""What a message declares: the one source of codec, roles, protocol page, schema and C header.

A request says in front of its class how it is asked, and below each field what that means:

    @request("seal", Socket.PREFILL, refusals="offer_unknown")
    class SealOffer(Request[Empty], frozen=True):
        ...
        offer_id: OfferId

The strings below classes and fields are the text of the page, in its words (nil, the op of another
message). A field without one means what the string below its type says.

A body that lacks a field, or has one of a wrong type or out of range, is `ProtocolError` with code
``invalid`` that names the field. Fields that this version does not know are ignored, so that a
minor version may add some.
"""

import hmac
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args

import msgspec

from kvbus.errors import (
    ErrorCode,
    KVBusError,
    LocalError,
    ProtocolError,
    RequestRefused,
    reason_of,
)

MAX_TEXT_CHARS = 4096
MAX_DETAILS = 32
Scalar = str | int | float
BUSY_RETRY_S = 0.1
"""When to ask again who is busy, if nothing better is known."""
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
Endpoint = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^tcp://[^\s/;,]+:[0-9]{1,5}$")]
"""ZeroMQ endpoint of the agent's peer socket."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Readers = Annotated[int, msgspec.Meta(ge=1, le=256)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Priority = Annotated[int, msgspec.Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
"""How urgent it is; see [priority](#priority)."""
Secret = Annotated[str, msgspec.Meta(min_length=16, max_length=128)]
"""The right to something: 128 random bits or more, never to be published or logged."""

MinProtocol = int
"""Lowest protocol version that the sender speaks."""
MaxProtocol = int
"""Highest protocol version that the sender speaks."""
Protocol = int
"""The version that both will speak."""
AgentId = Id
"""Name of the agent."""
AgentBoot = Id
"""Boot id of the agent's process; another one is ``stale``."""
ServerKey = Text
"""CURVE key of the agent, in Z85; empty without keys."""
EngineId = Id
"""The engine."""
OfferId = Id
"""The offer."""
FetchId = Id
"""The fetch."""
Epoch = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
"""The lease."""
MemoryId = Id
"""The ranks, as the handshake named them; others are ``stale``."""
MemoryAccess = Secret
"""What the handshake with this agent gave."""

REDACTED = frozenset(
    {"secret", "token", "access", "grant", "transfer_id", "signature", "ticket", "body", "ok"}
)
"""Fields that are a right, or may hold one: no repr shows them."""


class Socket(StrEnum):
    """Where a request is asked, and which agents answer it there."""

    ATTACH = "attach"
    ENGINE = "engine"
    """The engine socket, of every agent."""
    PREFILL = "prefill"
    """The engine socket of a prefill agent."""
    DECODE = "decode"
    PREFILL_PEER = "prefill_peer"
    DECODE_PEER = "decode_peer"
    MEMORY = "memory"


PEER_SOCKETS = (Socket.PREFILL_PEER, Socket.DECODE_PEER)


class Role(StrEnum):
    """What a key is trusted as."""

    PREFILL = "prefill"
    """An agent that decode agents may connect to; it asks for the status and for traces only."""
    DECODE = "decode"
    """An agent that reads, and that others of its engine may connect to."""
    ROUTER = "router"
    """Withdraws offers by their tickets."""
    OBSERVER = "observer"
    """Asks for the status and for traces, and hears events."""


HEARS_EVENTS = frozenset((Role.DECODE, Role.ROUTER, Role.OBSERVER))
OFFER_ENDED = "offer_withdrawn offer_expired offer_completed engine_lost draining"
"""What all is refused with that is about an offer which has ended."""


class Redacted(msgspec.Struct, frozen=True):
    """A struct whose repr leaves out what is a right to something."""

    def __repr__(self) -> str:
        shown = (
            f"{name}={'...' if name in REDACTED else repr(getattr(self, name))}"
            for name in self.__struct_fields__
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class Message(Redacted, frozen=True):
    """A body; ``op`` is the name of a request or notice."""

    op: ClassVar[str] = ""


M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)


class Request(Message, Generic[R], frozen=True):
    """The body of a request. `Request[Granted]` is answered with a `Granted`, or refused.

    One that is answered ``at_once`` never waits, or takes one of the places of its own kind: an
    agent that is full of what waits takes it. ``askers`` are the roles of keys that may ask it, on
    a peer socket; those of that socket are the same when done twice.
    """

    reply: ClassVar[type[Any]]
    at_once: ClassVar[bool] = False
    askers: ClassVar[frozenset[Role]] = frozenset()
    refusals: ClassVar[tuple[ErrorCode, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        (cls.reply,) = get_args(vars(cls)["__orig_bases__"][0])


class Empty(Message, frozen=True):
    """The reply that says no more than ok."""


REQUESTS: dict[Socket, dict[str, type[Request[Any]]]] = {socket: {} for socket in Socket}
NOTICES: dict[str, type[Message]] = {}
EVENTS: dict[str, type[Message]] = {}
_ASKERS: dict[str, frozenset[Role]] = {}
Q = TypeVar("Q", bound=Request[Any])


def request(
    op: str,
    *sockets: Socket,
    refusals: str = "",
    askers: Iterable[Role] = (Role.DECODE,),
    at_once: bool = False,
) -> Callable[[type[Q]], type[Q]]:
    """Declare the request ``op`` of ``sockets``; see `Request`.

    On a peer socket agents that read may ask it, or the ``askers`` that are named. ``refusals`` are
    the error codes, between spaces, that it has beside those of all requests.
    """

    def declare(kind: type[Q]) -> type[Q]:
        kind.op, kind.at_once = op, at_once
        kind.refusals = tuple(map(ErrorCode, refusals.split()))
        for socket in sockets:
            REQUESTS[socket][op] = kind
            if socket in PEER_SOCKETS:
                _ASKERS[op] = kind.askers = frozenset(askers)
        return kind

    return declare


def notice(op: str) -> Callable[[type[M]], type[M]]:
    """Declare a notice of agents to engines."""

    def declare(kind: type[M]) -> type[M]:
        kind.op, NOTICES[op] = op, kind
        return kind

    return declare


def event(*ops: str) -> Callable[[type[M]], type[M]]:
    """Declare the body of the events ``ops``, which are their topics, too."""

    def declare(kind: type[M]) -> type[M]:
        kind.op = ops[0] if len(ops) == 1 else ""
        EVENTS.update(dict.fromkeys(ops, kind))
        return kind

    return declare


def may_ask(roles: Iterable[Role], op: str) -> bool:
    """Whether a key of these ``roles`` may ask for ``op`` on a peer socket."""
    return not _ASKERS.get(op, frozenset()).isdisjoint(roles)


def may_hear(roles: Iterable[str]) -> bool:
    """Whether a key of these ``roles`` may subscribe to events."""
    return not HEARS_EVENTS.isdisjoint(roles)


class ErrorBody(Message, frozen=True):
    """The ``error`` of a reply."""

    code: ErrorCode
    """What happened, for programs."""
    message: Text
    """What happened, for people."""
    detail: dict[str, Scalar] = {}
    """Plain values, such as the field and both sides' values."""


def to_body(message: Message) -> dict[str, Any]:
    """The map of ``message``, as msgpack can pack it."""
    body: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return body


def from_body(kind: type[M], body: Mapping[str, Any]) -> M:
    """The typed body; raises `ProtocolError` (``invalid``) that says which field is wrong."""
    try:
        return msgspec.convert(body, kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        name = kind.op or kind.__name__
        reason = reason_of(error)
        raise ProtocolError(f"{name}: {reason}", code=ErrorCode.INVALID, op=name) from error


def error_body(error: KVBusError) -> dict[str, Any]:
    """The ``error`` map of a reply that refuses with ``error``; ``busy`` says until when."""
    is_busy = error.code is ErrorCode.BUSY
    hint: dict[str, Scalar] = {"retry_after_s": BUSY_RETRY_S} if is_busy else {}
    return {
        "code": error.code.value,
        "message": error.message[:MAX_TEXT_CHARS],
        "detail": hint | error.detail,
    }


def refusal(body: Mapping[str, Any]) -> RequestRefused:
    """The exception that an ``error`` map stands for, whatever the peer put into it.

    An unknown code, as a newer peer may have, reads as ``internal`` and is kept in the detail as
    ``remote_code``. Detail that is no plain value is dropped.
    """
    text, detail = body.get("message"), _plain(body.get("detail"))
    try:
        code = ErrorCode(str(body.get("code")))
    except ValueError:
        code = ErrorCode.INTERNAL
        detail["remote_code"] = str(body.get("code"))[:256]
    message = text if isinstance(text, str) else "refused without a message"
    refused = RequestRefused(message[:MAX_TEXT_CHARS], code=code)
    refused.detail = detail  # any keys: they are the peer's choice, never arguments of ours
    return refused


def _plain(detail: object) -> dict[str, Scalar]:
    if not isinstance(detail, dict):
        return {}
    plain = {k: v for k, v in detail.items() if isinstance(k, str) and isinstance(v, Scalar)}
    return dict(list(plain.items())[:MAX_DETAILS])


def check_right(shown: str | None, *rights: str) -> None:
    """Raise `LocalError` (``forbidden``) unless ``shown`` is one of ``rights``."""
    if shown is None or not any(_equal(shown, right) for right in rights):
        raise LocalError("that is not yours to ask", code=ErrorCode.FORBIDDEN)


def _equal(shown: str, right: str) -> bool:
    return hmac.compare_digest(shown.encode(), right.encode())
