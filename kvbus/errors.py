"""Every exception that kvbus raises, and the code that names it on the wire.

Refuses to know sockets, tensors or NIXL: a foreign exception is translated into one of these
where it is caught, with ``from`` kept.

    KVBusError                  anything that kvbus raises on purpose
    ├── LocalError              this process was used wrongly, or is not able to
    │   ├── ConfigError         a configuration key is missing, unknown or has a wrong value
    │   ├── GeometryError       a description of memory contradicts itself or leaves its segment
    │   ├── ProtocolError       bytes that are not a message of the protocol
    │   ├── SegmentError        shared memory cannot be created, mapped or passed
    │   └── ClosedError         a session, table or transport was used after its end
    └── RemoteError             the peer, the agent or the fabric did not do its part
        ├── RequestRefused      an error reply; ``code`` says which
        ├── RequestTimeout      no reply within the deadline
        ├── PeerLost            the other process is gone, or came back as a new one
        │   └── AgentHungUp     an agent ended the connection of an engine, and lives on
        ├── TransferFailed      NIXL ended a transfer with an error
        └── FetchFailed         a fetch ended without its KV; ``stage`` says where
"""

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request or a handoff failed. Values are the wire form and never change meaning."""

    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    UNSUPPORTED_VERSION = "unsupported_version"
    UNKNOWN_OP = "unknown_op"
    INVALID = "invalid"
    BUSY = "busy"
    DRAINING = "draining"
    STALE = "stale"
    FORBIDDEN = "forbidden"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    CLOSED = "closed"
    INTERNAL = "internal"
    CONFIG = "config"
    GEOMETRY = "geometry"
    INCOMPATIBLE = "incompatible"
    SEGMENT = "segment"
    NOT_REGISTERED = "not_registered"
    ENGINE_UNKNOWN = "engine_unknown"
    ENGINE_CONFLICT = "engine_conflict"
    ENGINE_NOT_READY = "engine_not_ready"
    ENGINE_LOST = "engine_lost"
    OFFER_UNKNOWN = "offer_unknown"
    OFFER_EXISTS = "offer_exists"
    OFFER_OPEN = "offer_open"
    OFFER_SEALED = "offer_sealed"
    OFFER_WITHDRAWN = "offer_withdrawn"
    OFFER_EXPIRED = "offer_expired"
    OFFER_COMPLETED = "offer_completed"
    LEASE_EXPIRED = "lease_expired"
    FETCH_UNKNOWN = "fetch_unknown"
    FETCH_EXISTS = "fetch_exists"
    PEER_UNREACHABLE = "peer_unreachable"
    PEER_LOST = "peer_lost"
    TRANSFER_FAILED = "transfer_failed"
    DIGEST_MISMATCH = "digest_mismatch"


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
    """A session, table or transport was used after its end."""

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
