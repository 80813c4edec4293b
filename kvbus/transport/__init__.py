"""Moves bytes between agents: the only package that imports nixl."""

from kvbus.transport.delivery import Deliver, OnEnd
from kvbus.transport.facts import (
    CloseReport,
    MemoryKind,
    ReadOutcome,
    ReadStatus,
    Registration,
    TransportLimits,
    TransportStats,
)
from kvbus.transport.handles import Demand, Read
from kvbus.transport.transport import Transport

__all__ = [
    "CloseReport",
    "Deliver",
    "Demand",
    "MemoryKind",
    "OnEnd",
    "Read",
    "ReadOutcome",
    "ReadStatus",
    "Registration",
    "Transport",
    "TransportLimits",
    "TransportStats",
]
