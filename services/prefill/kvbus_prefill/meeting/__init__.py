"""Offers that are known by a name before they are made: one state machine for each name (pure)."""

from kvbus_prefill.meeting import events
from kvbus_prefill.meeting.entry import MeetingLimits
from kvbus_prefill.meeting.table import MeetingTable

__all__ = ["MeetingLimits", "MeetingTable", "events"]
