"""Moves bytes between agents: the only package that imports nixl."""

from kvbus.transport.metadata import PeerMetadata
from kvbus.transport.slicing import Slices, check_rows
from kvbus.transport.transport import ProgressToken, Read, Transport
from kvbus.transport.types import (
    CloseReport,
    MemoryKind,
    ReadOutcome,
    ReadStatus,
    Registration,
    TransportLimits,
    TransportStats,
)

__all__ = [
    "CloseReport",
    "MemoryKind",
    "PeerMetadata",
    "ProgressToken",
    "Read",
    "ReadOutcome",
    "ReadStatus",
    "Registration",
    "Slices",
    "Transport",
    "TransportLimits",
    "TransportStats",
    "check_rows",
]
