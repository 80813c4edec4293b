"""Moves bytes between agents: the only package that imports nixl."""

from kvbus.transport.metadata import PeerMetadata
from kvbus.transport.slicing import Slices, check_rows
from kvbus.transport.transport import ProgressToken, Read, Transport
from kvbus.transport.types import (
    MemoryKind,
    ReadOutcome,
    ReadStatus,
    Registration,
    TransportLimits,
    TransportStats,
)

__all__ = [
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
