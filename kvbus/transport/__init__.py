"""Moves bytes between agents: the only package that imports nixl."""

from kvbus.transport.calibration import Area, fit_reads, measure_reads, measure_wire
from kvbus.transport.delivery import Deliver, OnEnd
from kvbus.transport.metadata import PeerMetadata
from kvbus.transport.transport import ProgressToken, Read, Transport
from kvbus.transport.types import (
    CloseReport,
    MemoryKind,
    ReadOutcome,
    ReadStatus,
    RecycleReport,
    Registration,
    TransportLimits,
    TransportStats,
)

__all__ = [
    "Area",
    "CloseReport",
    "Deliver",
    "MemoryKind",
    "OnEnd",
    "PeerMetadata",
    "ProgressToken",
    "Read",
    "ReadOutcome",
    "ReadStatus",
    "RecycleReport",
    "Registration",
    "Transport",
    "TransportLimits",
    "TransportStats",
    "fit_reads",
    "measure_reads",
    "measure_wire",
]
