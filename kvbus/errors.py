"""Every exception that kvbus raises, and the code that names it on the wire.

A foreign exception, as of a socket, torch or NIXL, is translated into one of these where it is
caught, with ``from`` kept.

    KVBusError                  anything that kvbus raises on purpose
    ├── LocalError              this process was used wrongly, or is not able to
    │   ├── ConfigError         a configuration key is missing, unknown or has a wrong value
    │   ├── GeometryError       a description of memory contradicts itself or leaves its segment
    │   ├── ProtocolError       bytes that are not a message of the protocol
    │   ├── SegmentError        shared memory cannot be created, mapped or passed
    │   └── ClosedError         a session, table or channel was used after its end
    └── RemoteError             the peer, the agent or the fabric did not do its part
        ├── RequestRefused      an error reply; ``code`` says which
        ├── RequestTimeout      no reply within the deadline
        ├── PeerLost            the other process is gone, or came back as a new one
        │   └── AgentHungUp     an agent ended the connection of an engine, and lives on
        ├── TransferFailed      NIXL ended a transfer with an error
        └── FetchFailed         a fetch ended without its KV; ``stage`` says where
"""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Self


class ErrorCode(StrEnum):
    """Why a request or a handoff failed. Values are the wire form and never change meaning.

    Below each is when it comes, and what the caller should do: docs/errors.md has it from here.
    """

    MALFORMED = "malformed"
    """The frame is not an envelope of this protocol. Do: correct the sender."""
    TOO_LARGE = "too_large"
    """The frame is over the limit. Do: send less at once."""
    UNSUPPORTED_VERSION = "unsupported_version"
    """No version is spoken by both, or the ticket is of another version. Do: update one of the
    two."""
    UNKNOWN_OP = "unknown_op"
    """This socket does not know the operation. Do: check the socket and the agent's role."""
    INVALID = "invalid"
    """A field is missing, has a wrong type or is out of range, or the request makes no sense now.
    Do: correct the request; the message names the field."""
    BUSY = "busy"
    """A bound is reached, or another reader has the lease. Do: try again, not before
    ``retry_after_s`` of the detail, and [not in step with others](#when-an-agent-is-busy)."""
    DRAINING = "draining"
    """The side is about to stop and takes nothing new. Do: use another agent."""
    STALE = "stale"
    """The message names a boot id, an engine or a lease epoch that is not the current one. Do: drop
    what the message was about. Shake hands or register again."""
    FORBIDDEN = "forbidden"
    """The right to it was not shown: the ticket's secret, the lease's token, the access to the
    memory, or a key of the right role. Do: leave tickets as the prefill engine gave them, and have
    the keys trusted on both sides."""
    PROMPT_MISMATCH = "prompt_mismatch"
    """The ticket is of another prompt than the fetch, or names no prompt where tickets are signed.
    Do: have the router send each ticket with its own prompt."""
    TIMEOUT = "timeout"
    """It was not done in time. Do: try again, or compute the prompt."""
    CANCELLED = "cancelled"
    """The engine cancelled it. Do: nothing."""
    CLOSED = "closed"
    """The side is closing its sockets. Do: connect again, or use another agent."""
    INTERNAL = "internal"
    """A defect of the side that answers; its log says more. Do: report it. Compute the prompt."""
    CONFIG = "config"
    """A process is configured wrongly, or not for what was asked. Do: correct the configuration."""
    GEOMETRY = "geometry"
    """A description of memory, a block table or a box is impossible. Do: correct the description;
    the detail names the field."""
    INCOMPATIBLE = "incompatible"
    """KV of one engine cannot be used by the other; the detail has ``field``, ``prefill`` and
    ``decode``. Do: do not pair these two engines."""
    SEGMENT = "segment"
    """Shared memory cannot be mapped, or was not passed. Do: pass the segment first, of the size
    that was said."""
    NOT_REGISTERED = "not_registered"
    """The session has not said ``hello`` or ``register``. Do: say ``hello`` on the attach socket,
    then ``register``."""
    ENGINE_UNKNOWN = "engine_unknown"
    """The agent has no engine of that name. Do: check the ticket, and whether the engine runs."""
    ENGINE_CONFLICT = "engine_conflict"
    """Another live process has that engine id or rank, or the specs of two sessions differ. Do:
    end the process that the message names, by `kill -9` if it is stopped, or use another id."""
    ENGINE_NOT_READY = "engine_not_ready"
    """Not all ranks of the engine are registered, or the agent has no engine that could make the
    offer. Do: try again a little later."""
    ENGINE_LOST = "engine_lost"
    """The engine's process is gone. Do: start the engine again."""
    OFFER_UNKNOWN = "offer_unknown"
    """No such offer, or it ended so long ago that it is forgotten. Do: compute the prompt."""
    OFFER_EXISTS = "offer_exists"
    """The request has a live offer. Do: withdraw that offer first; the detail names it."""
    OFFER_OPEN = "offer_open"
    """The offer is not sealed, so it cannot be taken, and has no states yet. Do: renew until it is.
    """
    OFFER_SEALED = "offer_sealed"
    """The offer is sealed, so it cannot change. Do: make a new offer."""
    OFFER_WITHDRAWN = "offer_withdrawn"
    """The offer was withdrawn. Do: nothing."""
    OFFER_EXPIRED = "offer_expired"
    """The offer was not read in time. Do: compute the prompt; raise ``ttl_s`` if this is common."""
    OFFER_COMPLETED = "offer_completed"
    """The offer was read and taken. Do: nothing."""
    LEASE_EXPIRED = "lease_expired"
    """The lease, or that of a staging slot, ended before the bytes had been read. Do: try again,
    with a longer lease."""
    FETCH_UNKNOWN = "fetch_unknown"
    """No such fetch, or it ended so long ago that it is forgotten. Do: nothing."""
    FETCH_EXISTS = "fetch_exists"
    """The fetch id was used already. Do: use a new id."""
    PEER_UNREACHABLE = "peer_unreachable"
    """The other agent cannot be reached. Do: check the endpoint and the network. Try again, or
    compute the prompt."""
    PEER_LOST = "peer_lost"
    """The other agent was lost until the deadline. Do: compute the prompt."""
    TRANSFER_FAILED = "transfer_failed"
    """A READ or a copy failed; a fetch repeats it until its deadline. Do: compute the prompt."""
    DIGEST_MISMATCH = "digest_mismatch"
    """What was read has other bytes than the prefill engine: a layer, a head and tokens are named.
    Do: try again, once; then compute the prompt, and have the machines looked at."""


class KVBusError(Exception):
    """Base of all; ``code`` is the wire form, ``detail`` plain values for logs and replies."""

    default_code = ErrorCode.INTERNAL

    def __init__(
        self, message: str, *, code: ErrorCode | None = None, **detail: str | int | float
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.detail = detail

    def without_frames(self) -> Self:
        """Drop traceback and causes before the error is kept: frames hold messages and tables."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class LocalError(KVBusError):
    """This process was used wrongly, or is not able to do what was asked."""

    default_code = ErrorCode.INVALID


class ConfigError(LocalError):
    """A configuration key is missing, unknown or has a wrong value; the message names the key."""

    default_code = ErrorCode.CONFIG


class GeometryError(LocalError):
    """A description of memory contradicts itself, overlaps, or leaves its segment."""

    default_code = ErrorCode.GEOMETRY


class ProtocolError(LocalError):
    """Bytes that are not a message; ``request_id`` is set when the reply can be addressed."""

    default_code = ErrorCode.MALFORMED

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode | None = None,
        request_id: int | None = None,
        **detail: str | int | float,
    ) -> None:
        super().__init__(message, code=code, **detail)
        self.request_id = request_id


class SegmentError(LocalError):
    """Shared memory cannot be created, mapped or passed."""

    default_code = ErrorCode.SEGMENT


class ClosedError(LocalError):
    """A session, table or channel was used after its end."""

    default_code = ErrorCode.CLOSED


class TooEarly(LocalError):
    """It may be there later, and whoever wants it asks again: nothing is wrong."""

    default_code = ErrorCode.BUSY


class RemoteError(KVBusError):
    """The peer, the agent or the fabric did not do its part."""


class RequestRefused(RemoteError):
    """An error reply; ``code``, ``message`` and ``detail`` are those of the reply."""


class RequestTimeout(RemoteError):
    """No reply within the deadline. The request may still have been done: retry is idempotent."""

    default_code = ErrorCode.TIMEOUT


class PeerLost(RemoteError):
    """The other process is gone, or came back as a new one with another boot id."""

    default_code = ErrorCode.PEER_LOST


class AgentHungUp(PeerLost):
    """An agent ended the connection of an engine, and lives on, or nobody can say.

    What it was writing for the engine may still be written.
    """


class TransferFailed(RemoteError):
    """NIXL ended a transfer with an error; nothing of it is in flight any more."""

    default_code = ErrorCode.TRANSFER_FAILED


class FetchFailed(RemoteError):
    """A fetch ended without its KV.

    ``stage`` is the state in which it failed. ``blocks_free`` is False while transfers that
    target the blocks can still land: wait for the fetch's blocks before they are used again.
    """

    default_code = ErrorCode.TRANSFER_FAILED

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode,
        stage: str,
        blocks_free: bool,
        **detail: str | int | float,
    ) -> None:
        super().__init__(message, code=code, **detail)
        self.stage = stage
        self.blocks_free = blocks_free


def leaves(group: BaseExceptionGroup[KVBusError]) -> list[KVBusError]:
    """The errors inside nested groups, in the order in which they were raised."""
    found: list[KVBusError] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def reason_of(error: Exception) -> str:
    """Return what msgspec refused, in plain words: ``'tp' must be at most 8``."""
    field, reason = field_and_reason(error)
    return f"'{field}' {reason}" if field else reason


def field_and_reason(error: Exception) -> tuple[str, str]:
    """Return the field that msgspec refused, and a predicate that says why.

    The field is a path, such as ``groups[].layers`` for one of any item of a list. It is empty
    where the whole value is wrong.
    """
    found = _WHERE.fullmatch(str(error))
    text, is_key, path = found.groups() if found else (str(error), None, "")
    field = (path or "").replace("[...]", "[]").lstrip(".")
    if about := _OF_A_FIELD.fullmatch(text):
        is_missing, name = about.groups()
        return f"{field}.{name}".lstrip("."), "is missing" if is_missing else "is unknown"
    return field, f"has a key that {in_plain_words(text)}" if is_key else in_plain_words(text)


def in_plain_words(message: str) -> str:
    """Return a message of msgspec, pydantic or Python in plain words; other text as it is."""
    for pattern, write in _MESSAGES:
        if found := pattern.fullmatch(message):
            return write(*found.groups())
    return message


_WHERE = re.compile(r"(?s)(.*?) - at `(?:(key)` in `)?\$([^`]*)`")
_OF_A_FIELD = re.compile(r"Object (?:(missing required)|contains unknown) field `([^`]*)`")
_KINDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "integer": "an integer",
    "null": "nil",
    "number": "a number",
    "object": "a map",
    "str": "a string",
}
_UNITS = {"array": "items", "bytes": "bytes", "object": "entries", "str": "characters"}
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}


def _kinds(names: str) -> str:
    return " or ".join(_KINDS.get(name, name) for name in names.split(" | "))


_MESSAGES: tuple[tuple[re.Pattern[str], Callable[..., str]], ...] = (
    (re.compile(r"Expected `([^`]+)`"), lambda kinds: f"must be {_kinds(kinds)}"),
    (
        re.compile(r"Expected `([^`]+)`, got `([^`]+)`"),
        lambda kinds, kind: f"must be {_kinds(kinds)}, not {_kinds(kind)}",
    ),
    (
        re.compile(r"Expected `[^`]+` ([<>]=?) (.+)"),
        lambda bound, number: f"must be {_BOUNDS[bound]} {number}",
    ),
    (re.compile(r"Expected `\w+` of length >= 1"), lambda: "must not be empty"),
    (
        re.compile(r"Expected `(\w+)` of length ([<>]=) (\d+)"),
        lambda kind, bound, n: f"must have {_BOUNDS[bound]} {int(n):,} {_UNITS[kind]}",
    ),
    (
        re.compile(r"Expected `array` of length (\d+), got (\d+)"),
        lambda wanted, number: f"must have {wanted} items, not {number}",
    ),
    (re.compile(r"Expected `str` matching regex (.+)"), lambda text: f"must match {text}"),
    (re.compile(r"Invalid enum value (.+)"), lambda value: f"cannot be {value}"),
    (re.compile(r"Input data was truncated"), lambda: "ends too early"),
    (
        re.compile(r"Input should be a valid (integer|number).*"),
        lambda kind: f"must be {_KINDS[kind]}",
    ),
    (
        re.compile(r"Input should be (greater|less) than or equal to (.+)"),
        lambda than, number: f"must be at {'least' if than == 'greater' else 'most'} {number}",
    ),
    (re.compile(r"Value error, (.+?)\.?"), lambda reason: reason),
    (re.compile(r"'utf-8' codec .+"), lambda: "is not UTF-8 text"),
    (re.compile(r"\[Errno \d+\] (.+)"), lambda reason: reason),
)
