"""A message body as a typed struct, and the only way between it and the map on the wire.

Refuses a body that lacks a field, has one of a wrong type or out of range: `ProtocolError` with
code ``invalid`` that names the field. Fields that this version does not know are ignored, so that
a minor version may add some.
"""

import hmac
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, TypeVar, cast, get_args

import msgspec

from kvbus.errors import ErrorCode, KVBusError, LocalError, ProtocolError, RequestRefused

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Endpoint = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^tcp://[^\s/;,]+:[0-9]{1,5}$")]
"""Where another agent is; no other transport of ZeroMQ leads to one."""
MAX_TEXT_CHARS = 4096
MAX_DETAILS = 32
PLAIN = str | int | float
BUSY_RETRY_S = 0.1
"""When to ask again who is busy, if nothing better is known."""

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
Echo = Annotated[str, msgspec.Meta(max_length=2 * MAX_TEXT_CHARS)]
"""More than a packet of most networks holds."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Epoch = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Readers = Annotated[int, msgspec.Meta(ge=1, le=256)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
Priority = Annotated[int, msgspec.Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
"""How urgent something is: more, the greater it is; 0 as a rule."""
Secret = Annotated[str, msgspec.Meta(min_length=16, max_length=128)]
"""The right to something: random, of 128 bits or more; never in an event, a log line or a repr."""
# An address plus an offset in a segment fits into a signed 64-bit integer.
Address = Annotated[int, msgspec.Meta(ge=0, le=2**62 - 1)]


UNSPOKEN = frozenset(
    {"secret", "token", "access", "transfer_id", "signature", "ticket", "body", "ok"}
)
"""Fields that are a right, or may hold one: no repr shows them."""


class Discreet(msgspec.Struct, frozen=True):
    """A struct whose repr leaves out what is a right to something."""

    def __repr__(self) -> str:
        """Field by field, with dots for those of `UNSPOKEN`."""
        shown = (
            f"{name}={'...' if name in UNSPOKEN else repr(getattr(self, name))}"
            for name in self.__struct_fields__
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class Message(Discreet, frozen=True):
    """A body; ``op`` is the name of a request or notice."""

    op: ClassVar[str] = ""


R = TypeVar("R", bound=Message)


class Request(Message, Generic[R], frozen=True):
    """The body of a request. `Request[Granted]` is answered with a `Granted`, or refused.

    One that is answered ``at_once`` never waits, or takes one of the places of its own kind: an
    agent that is full of what waits takes it.
    """

    reply: ClassVar[type[Message]]
    at_once: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        (cls.reply,) = get_args(vars(cls)["__orig_bases__"][0])


class Empty(Message, frozen=True):
    """The reply that says no more than ok."""


class ErrorBody(Message, frozen=True):
    """The ``error`` of a reply: code, a sentence for a person, and plain values for a program."""

    code: ErrorCode
    message: Text
    detail: dict[str, str | int | float] = {}


M = TypeVar("M", bound=Message)


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
        raise ProtocolError(f"{name}: {error}", code=ErrorCode.INVALID, op=name) from error


def read_reply(request: Request[R], body: Mapping[str, Any]) -> R:
    """The typed reply to ``request``; raises `ProtocolError` as `from_body` does."""
    return cast("R", from_body(request.reply, body))


def error_body(error: KVBusError) -> dict[str, Any]:
    """The ``error`` map of a reply that refuses with ``error``; ``busy`` says until when."""
    is_busy = error.code is ErrorCode.BUSY
    hint: dict[str, PLAIN] = {"retry_after_s": BUSY_RETRY_S} if is_busy else {}
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


def _plain(detail: object) -> dict[str, str | int | float]:
    if not isinstance(detail, dict):
        return {}
    plain = {k: v for k, v in detail.items() if isinstance(k, str) and isinstance(v, PLAIN)}
    return dict(list(plain.items())[:MAX_DETAILS])


def check_right(shown: str | None, *rights: str) -> None:
    """Raise `LocalError` (``forbidden``) unless ``shown`` is one of ``rights``."""
    if shown is None or not any(_equal(shown, right) for right in rights):
        raise LocalError("that is not yours to ask", code=ErrorCode.FORBIDDEN)


def _equal(shown: str, right: str) -> bool:
    return hmac.compare_digest(shown.encode(), right.encode())
