"""Exceptions of kvbus, and the codes that name them on the wire.

Exceptions of sockets, torch, NIXL and other libraries are converted into these where they are
caught, with ``from``.

    KVBusError
    ├── LocalError
    │   ├── ConfigError
    │   ├── GeometryError
    │   ├── ProtocolError
    │   ├── SegmentError
    │   ├── ClosedError
    │   └── TooEarly
    └── RemoteError
        ├── RequestRefused
        ├── RequestTimeout
        ├── PeerLost
        │   └── AgentHungUp
        ├── TransferFailed
        └── FetchFailed
"""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Self

_DOCS = "https://kvbus.github.io/kvbus"


class ErrorCode(StrEnum):
    """Reason why a request or a handoff failed. Values are the wire form and never change meaning.

    The string below a code has its cause and, after "Do:", the caller's remedy. docs/errors.md is
    generated from these strings.
    """

    MALFORMED = "malformed"
    """The frame is not an envelope of this protocol. Do: fix the sender."""
    TOO_LARGE = "too_large"
    """The message exceeds a limit. Do: send smaller messages."""
    UNSUPPORTED_VERSION = "unsupported_version"
    """The two sides, or the ticket, have different protocol versions. Do: update one side."""
    UNKNOWN_OP = "unknown_op"
    """This socket does not support the operation. Do: check the socket and the agent's role."""
    INVALID = "invalid"
    """A field is missing or wrong, or the current state does not allow the request. Do: correct the
    request; the message names the field."""
    BUSY = "busy"
    """A limit is reached, or another reader has the lease. Do: retry after ``retry_after_s`` of the
    detail."""
    DRAINING = "draining"
    """The agent is shutting down. Do: use another agent."""
    STALE = "stale"
    """The message names an old boot id, engine or lease epoch. Do: drop that state; shake hands or
    register again."""
    FORBIDDEN = "forbidden"
    """A credential is missing or invalid: ticket secret, lease token, ``rank_secret``, or a key
    with the right role. Do: pass tickets on unchanged; make each side trust the other's key."""
    PROMPT_MISMATCH = "prompt_mismatch"
    """The ticket is for another prompt, or is signed without a prompt digest. Do: make the router
    send each ticket with its own prompt."""
    TIMEOUT = "timeout"
    """The operation did not end in time. Do: retry, or compute the prompt."""
    CANCELLED = "cancelled"
    """The engine cancelled the operation. Do: nothing."""
    CLOSED = "closed"
    """The other side is closing its sockets. Do: reconnect, or use another agent."""
    INTERNAL = "internal"
    """A bug of the replying side; its log has details. Do: report it; compute the prompt."""
    CONFIG = "config"
    """The configuration is wrong, or does not allow the request. Do: correct it."""
    GEOMETRY = "geometry"
    """A memory description, block table or tile is invalid. Do: correct it; the detail names the
    field."""
    INCOMPATIBLE = "incompatible"
    """One engine cannot use the KV of the other. The detail has ``field``, ``prefill`` and
    ``decode``. Do: do not pair these engines."""
    SEGMENT = "segment"
    """Shared memory cannot be mapped, or was not passed. Do: pass the segment first, with its
    declared size."""
    NOT_REGISTERED = "not_registered"
    """The session has not sent ``hello`` or ``register``. Do: send ``hello`` on the attach socket,
    then ``register``."""
    ENGINE_UNKNOWN = "engine_unknown"
    """The agent has no engine with this id. Do: check the ticket, and that the engine runs."""
    ENGINE_CONFLICT = "engine_conflict"
    """Another live process has this engine id or rank, or two sessions differ in their specs. Do:
    kill the process that the message names (``kill -9`` if it is stopped), or use another id."""
    ENGINE_NOT_READY = "engine_not_ready"
    """Some ranks of the engine are not registered, or no engine can make the offer yet. Do: retry a
    little later."""
    ENGINE_LOST = "engine_lost"
    """The engine's process has ended. Do: restart the engine."""
    OFFER_UNKNOWN = "offer_unknown"
    """The offer does not exist, or its record is gone. Do: compute the prompt."""
    OFFER_EXISTS = "offer_exists"
    """The request already has a live offer. Do: withdraw the offer that the detail names."""
    OFFER_OPEN = "offer_open"
    """The offer is not sealed: it cannot be committed, and its states cannot be read. Do: renew
    until it is sealed."""
    OFFER_SEALED = "offer_sealed"
    """The offer is sealed and cannot change. Do: make a new offer."""
    OFFER_PARKED = "offer_parked"
    """The offer is in the pool that ``engine_id`` and ``engine_instance`` of the detail name. Do:
    read it there, with the same ticket."""
    OFFER_WITHDRAWN = "offer_withdrawn"
    """The offer was withdrawn. Do: nothing."""
    OFFER_EXPIRED = "offer_expired"
    """The offer was not read in time. Do: compute the prompt; raise ``ttl_s`` if this is common."""
    OFFER_COMPLETED = "offer_completed"
    """The offer was already read. Do: nothing."""
    LEASE_EXPIRED = "lease_expired"
    """The lease of the offer or of a staging slot ended before the read. Do: retry with a longer
    lease."""
    FETCH_UNKNOWN = "fetch_unknown"
    """The fetch does not exist, or its record is gone. Do: nothing."""
    FETCH_EXISTS = "fetch_exists"
    """The fetch id was used before. Do: use a new id."""
    PEER_UNREACHABLE = "peer_unreachable"
    """The other agent cannot be reached. Do: check the endpoint and the network; retry, or compute
    the prompt."""
    PEER_LOST = "peer_lost"
    """The other agent was lost. Do: compute the prompt."""
    TRANSFER_FAILED = "transfer_failed"
    """A READ or a copy failed. Do: compute the prompt."""
    DIGEST_MISMATCH = "digest_mismatch"
    """The bytes read differ from the prefill engine's; the message names layer, head and tokens.
    Do: retry once, then compute the prompt; check the machines."""


class KVBusError(Exception):
    """Base of all errors: ``code`` is the wire form, ``detail`` has plain values for logs and
    replies.
    """

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
    """Wrong use of this process, or a request that it cannot perform."""

    default_code = ErrorCode.INVALID


class ConfigError(LocalError):
    """A missing, unknown or wrong configuration key; the message names the key."""

    default_code = ErrorCode.CONFIG


class GeometryError(LocalError):
    """A wrong memory description, or wrong block ids."""

    default_code = ErrorCode.GEOMETRY


class ProtocolError(LocalError):
    """Bytes that are not a message; ``request_id`` is set if a reply can be addressed."""

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
    """Shared memory that cannot be created, mapped or passed."""

    default_code = ErrorCode.SEGMENT


class ClosedError(LocalError):
    """Use of a link, session or table that is closed, or not open yet."""

    default_code = ErrorCode.CLOSED


class TooEarly(LocalError):
    """A result that is not ready yet; the caller retries."""

    default_code = ErrorCode.BUSY


class RemoteError(KVBusError):
    """A failure of the peer, the agent or the fabric."""


class RequestRefused(RemoteError):
    """An error reply; ``code``, ``message`` and ``detail`` are those of the reply."""


class RequestTimeout(RemoteError):
    """A request without a reply in time. It may have succeeded; a retry is idempotent."""

    default_code = ErrorCode.TIMEOUT


class PeerLost(RemoteError):
    """The end of another process, or its replacement by one with another boot id."""

    default_code = ErrorCode.PEER_LOST


class AgentHungUp(PeerLost):
    """A connection that an agent closed although it is alive, or its state is unknown.

    Its pending writes for the engine may still land.
    """


class TransferFailed(RemoteError):
    """A NIXL transfer that failed; none of it is in flight."""

    default_code = ErrorCode.TRANSFER_FAILED


class FetchFailed(RemoteError):
    """A fetch that ended without its KV.

    ``stage`` is the state in which it failed. If ``blocks_free`` is False, transfers can still land
    in the blocks: wait for `Fetch.freed` before you reuse them.
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
    """Return the errors inside nested groups, in the order in which they were raised."""
    found: list[KVBusError] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def reason_of(error: Exception) -> str:
    """Return the reason of a msgspec refusal in plain English: ``'tp' must be at most 8``."""
    field, reason = field_and_reason(error)
    return f"'{field}' {reason}" if field else reason


def field_and_reason(error: Exception) -> tuple[str, str]:
    """Return the path of the field that msgspec refused, and the reason, such as ``is missing``.

    ``groups[].layers`` stands for any item of a list. The path is empty if the whole value is
    wrong.
    """
    located = _MESSAGE_AT_PATH.fullmatch(str(error))
    text, is_key, path = located.groups() if located else (str(error), None, "")
    field = (path or "").replace("[...]", "[]").lstrip(".")
    if missing_or_unknown := _MISSING_OR_UNKNOWN.fullmatch(text):
        is_missing, name = missing_or_unknown.groups()
        return f"{field}.{name}".lstrip("."), "is missing" if is_missing else "is unknown"
    return field, f"has a key that {plain_message(text)}" if is_key else plain_message(text)


def plain_message(message: str) -> str:
    """Return a message of msgspec, pydantic or Python in plain English, other text unchanged."""
    for pattern, write in _MESSAGES:
        if found := pattern.fullmatch(message):
            return write(*found.groups())
    return message


_MESSAGE_AT_PATH = re.compile(r"(?s)(.*?) - at `(?:(key)` in `)?\$([^`]*)`")
_MISSING_OR_UNKNOWN = re.compile(r"Object (?:(missing required)|contains unknown) field `([^`]*)`")
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


def docs_url(page: str, heading: str = "") -> str:
    """Return the address of a page of the documentation."""
    return f"{_DOCS}/{page}/" + (f"#{heading}" if heading else "")
