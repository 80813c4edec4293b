"""Declarations of messages: the one source of codec, roles, protocol page, schema and C header.

    @request("seal", Socket.PREFILL, refusals="offer_unknown")
    class SealOffer(Request[Empty], frozen=True):
        ...
        offer_id: OfferId

The strings below classes and fields are the text of the protocol pages, in the terms of these
pages. A field without a string has the one below its type. Unknown fields are ignored, so a minor
version may add some.
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
"""Default ``retry_after_s`` of a ``busy`` refusal."""
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
Endpoint = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^tcp://[^\s/;,]+:[0-9]{1,5}$")]
"""Peer socket of the agent."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Readers = Annotated[int, msgspec.Meta(ge=1, le=256)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
SequenceNumber = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""[Number](#order-behind-gpu-work) that the engine's ranks must have written; 0 for none."""
Priority = Annotated[int, msgspec.Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
Secret = Annotated[str, msgspec.Meta(min_length=16, max_length=128)]

MinProtocol = int
MaxProtocol = int
Protocol = int
AgentId = Id
AgentBoot = Id
"""Any other is ``stale``."""
ServerKey = Text
"""CURVE key of the agent, in Z85; empty without keys."""
EngineId = Id
OfferId = Id
FetchId = Id
Epoch = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
MemoryId = Id
"""From the reply to ``handshake``; ``stale`` if the ranks have changed."""
RankSecret = Secret
"""From this agent's reply to ``handshake``."""

REDACTED = frozenset(
    {"secret", "token", "rank_secret", "grant", "transfer_id", "signature", "ticket", "body", "ok"}
)
"""Fields that may contain a credential."""


class Socket(StrEnum):
    """Socket of a request, and the agents that answer it there."""

    ATTACH = "attach"
    ENGINE = "engine"
    """The engine socket of every agent."""
    PREFILL = "prefill"
    """The engine socket of a prefill agent."""
    DECODE = "decode"
    PREFILL_PEER = "prefill_peer"
    DECODE_PEER = "decode_peer"
    MEMORY = "memory"


PEER_SOCKETS = (Socket.PREFILL_PEER, Socket.DECODE_PEER)


class Role(StrEnum):
    """Role of a trusted key."""

    PREFILL = "prefill"
    """An agent that decode agents may connect to. It may request only status and traces."""
    DECODE = "decode"
    """An agent that reads. Other agents of its engine may connect to it."""
    ROUTER = "router"
    """A router, which withdraws offers by their tickets."""
    OBSERVER = "observer"
    """A tool that requests status and traces, and receives events."""


EVENT_ROLES = frozenset((Role.DECODE, Role.ROUTER, Role.OBSERVER))
OFFER_ENDED = "offer_withdrawn offer_expired offer_completed engine_lost draining"
"""Refusals of every request about an offer that has ended."""


class Redacted(msgspec.Struct, frozen=True):
    """A struct with a repr that hides credentials."""

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

    A full agent still accepts requests with ``at_once``: they never wait, or have a limit of their
    own. On a peer socket, requests are idempotent, and only keys with ``allowed_roles`` may send
    them.
    """

    reply: ClassVar[type[Any]]
    at_once: ClassVar[bool] = False
    allowed_roles: ClassVar[frozenset[Role]] = frozenset()
    refusals: ClassVar[tuple[ErrorCode, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        (cls.reply,) = get_args(vars(cls)["__orig_bases__"][0])


class Empty(Message, frozen=True):
    """A reply without fields."""


REQUESTS: dict[Socket, dict[str, type[Request[Any]]]] = {socket: {} for socket in Socket}
NOTICES: dict[str, type[Message]] = {}
EVENTS: dict[str, type[Message]] = {}
_ALLOWED_ROLES: dict[str, frozenset[Role]] = {}
Q = TypeVar("Q", bound=Request[Any])


def request(
    op: str,
    *sockets: Socket,
    refusals: str = "",
    allowed_roles: Iterable[Role] = (Role.DECODE,),
    at_once: bool = False,
) -> Callable[[type[Q]], type[Q]]:
    """Declare the request ``op`` of ``sockets``.

    ``refusals`` are its error codes, separated by spaces, in addition to those of all requests.
    """

    def declare(kind: type[Q]) -> type[Q]:
        kind.op, kind.at_once = op, at_once
        kind.refusals = tuple(map(ErrorCode, refusals.split()))
        for socket in sockets:
            REQUESTS[socket][op] = kind
            if socket in PEER_SOCKETS:
                _ALLOWED_ROLES[op] = kind.allowed_roles = frozenset(allowed_roles)
        return kind

    return declare


def notice(op: str) -> Callable[[type[M]], type[M]]:
    def declare(kind: type[M]) -> type[M]:
        kind.op, NOTICES[op] = op, kind
        return kind

    return declare


def event(*ops: str) -> Callable[[type[M]], type[M]]:
    """Declare the body of the events ``ops``, which are also their topics."""

    def declare(kind: type[M]) -> type[M]:
        kind.op = ops[0] if len(ops) == 1 else ""
        EVENTS.update(dict.fromkeys(ops, kind))
        return kind

    return declare


def may_request(roles: Iterable[Role], op: str) -> bool:
    return not _ALLOWED_ROLES.get(op, frozenset()).isdisjoint(roles)


def may_subscribe(roles: Iterable[str]) -> bool:
    return not EVENT_ROLES.isdisjoint(roles)


class ErrorBody(Message, frozen=True):
    """The ``error`` of a reply."""

    code: ErrorCode
    message: Text
    """For people."""
    detail: dict[str, Scalar] = {}
    """Plain values, such as the field and the values of both sides."""


def to_body(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return body


def from_body(kind: type[M], body: Mapping[str, Any]) -> M:
    """Raise `ProtocolError` (``invalid``) that names the wrong field."""
    try:
        return msgspec.convert(body, kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        name = kind.op or kind.__name__
        reason = reason_of(error)
        raise ProtocolError(f"{name}: {reason}", code=ErrorCode.INVALID, op=name) from error


def error_body(error: KVBusError) -> dict[str, Any]:
    is_busy = error.code is ErrorCode.BUSY
    hint: dict[str, Scalar] = {"retry_after_s": BUSY_RETRY_S} if is_busy else {}
    return {
        "code": error.code.value,
        "message": error.message[:MAX_TEXT_CHARS],
        "detail": hint | error.detail,
    }


def refusal(body: Mapping[str, Any]) -> RequestRefused:
    """Return the exception for an ``error`` map with any content.

    An unknown code, from a newer peer, becomes ``internal``; the detail has it as ``remote_code``.
    """
    text, detail = body.get("message"), _plain(body.get("detail"))
    try:
        code = ErrorCode(str(body.get("code")))
    except ValueError:
        code = ErrorCode.INTERNAL
        detail["remote_code"] = str(body.get("code"))[:256]
    message = text if isinstance(text, str) else "refused without a message"
    refused = RequestRefused(message[:MAX_TEXT_CHARS], code=code)
    refused.detail = detail  # the peer chooses the keys, so they are never keyword arguments
    return refused


def _plain(detail: object) -> dict[str, Scalar]:
    if not isinstance(detail, dict):
        return {}
    plain = {k: v for k, v in detail.items() if isinstance(k, str) and isinstance(v, Scalar)}
    return dict(list(plain.items())[:MAX_DETAILS])


def check_right(shown: str | None, *rights: str) -> None:
    """Raise `LocalError` (``forbidden``) unless ``shown`` is one of ``rights``."""
    if shown is None or not any(is_right(shown, right) for right in rights):
        raise LocalError("this role may not request it", code=ErrorCode.FORBIDDEN)


def is_right(shown: str, right: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(shown.encode(), right.encode())
