"""Reads: how the chunks of fetches get into the engine's blocks."""

from kvbus_decode.read import table as events
from kvbus_decode.read.table import Leg, LegState, ReadLimits, ReadTable

__all__ = ["Leg", "LegState", "ReadLimits", "ReadTable", "events"]
