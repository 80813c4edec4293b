"""Reads: how the chunks of fetches get into the engine's blocks."""

from kvbus_decode.read import events
from kvbus_decode.read.leg import Leg, LegState, Stage
from kvbus_decode.read.table import ReadLimits, ReadTable

__all__ = ["Leg", "LegState", "ReadLimits", "ReadTable", "Stage", "events"]
