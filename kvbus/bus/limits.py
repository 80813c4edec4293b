"""Bounds and counters of the bus: how much may pile up, and what happened so far."""

from dataclasses import dataclass

from kvbus.protocol.envelope import MAX_FRAME_BYTES, MAX_PEER_REQUEST_BYTES, too_large


def max_request_bytes(endpoint: str) -> int:
    """The largest request there: over TCP, where strangers may ask, it is smaller."""
    return MAX_PEER_REQUEST_BYTES if endpoint.startswith("tcp://") else MAX_FRAME_BYTES


def require_size(frame: bytes, max_bytes: int) -> None:
    """Raise `ProtocolError` (``too_large``) for a frame of more than ``max_bytes``."""
    if len(frame) > max_bytes:
        raise too_large(len(frame), max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds of a `RequestServer`."""

    max_sessions: int = 1024
    max_pending: int = 8192
    max_session_pending: int = 1024
    max_forgotten: int = 4096


@dataclass(slots=True)
class ServerCounters:
    """What a `RequestServer` saw and did since it was made."""

    requests: int = 0
    pings: int = 0
    repeats_absorbed: int = 0
    malformed: int = 0
    busy: int = 0
    stale: int = 0
    faults: int = 0
    replies: int = 0
    replies_dropped: int = 0
    notices: int = 0
    sessions_evicted: int = 0
