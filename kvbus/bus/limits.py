"""Bounds and counters of the bus: how much may pile up, and what happened so far."""

from dataclasses import dataclass

from kvbus.errors import ConfigError
from kvbus.protocol.envelope import MAX_FRAME_BYTES, MAX_PEER_REQUEST_BYTES, too_large

_MIB = 1024 * 1024


def max_request_bytes(endpoint: str) -> int:
    """The largest request there: over TCP, where strangers may ask, it is smaller."""
    return MAX_PEER_REQUEST_BYTES if endpoint.startswith("tcp://") else MAX_FRAME_BYTES


def require_size(frame: bytes, max_bytes: int) -> None:
    """Raise `ProtocolError` (``too_large``) for a frame of more than ``max_bytes``."""
    if len(frame) > max_bytes:
        raise too_large(len(frame), max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds of a `RequestServer`; notices are bounded for each session, replies over all.

    There may be a session for each connection that `DoorLimits` allows.
    """

    max_sessions: int = 1024
    max_pending: int = 8192
    max_session_pending: int = 1024
    max_replies: int = 32_768
    max_reply_bytes: int = 64 * _MIB
    max_notices: int = 4096
    max_notice_bytes: int = 32 * _MIB
    max_forgotten: int = 4096

    def __post_init__(self) -> None:
        if self.max_reply_bytes < MAX_FRAME_BYTES:
            raise ConfigError("max_reply_bytes must hold the largest frame")


@dataclass(slots=True)
class ServerCounters:
    """What a `RequestServer` saw and did since it was made."""

    requests: int = 0
    pings: int = 0
    repeats_answered: int = 0
    repeats_absorbed: int = 0
    malformed: int = 0
    busy: int = 0
    stale: int = 0
    faults: int = 0
    replies: int = 0
    replies_dropped: int = 0
    notices: int = 0
    notices_resent: int = 0
    sessions_evicted: int = 0


@dataclass(slots=True)
class ClientCounters:
    """What a `RequestClient` saw and did since it was made."""

    requests: int = 0
    retries: int = 0
    timeouts: int = 0
    late_replies: int = 0
    notices: int = 0
    notices_repeated: int = 0
    malformed: int = 0
    stale: int = 0
    boots: int = 0


@dataclass(slots=True)
class SubscriberCounters:
    """What an `EventSubscriber` saw since it was made."""

    events: int = 0
    heartbeats: int = 0
    gaps: int = 0
    malformed: int = 0
    stale: int = 0
