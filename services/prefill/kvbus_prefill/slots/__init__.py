"""Staging slots and who may have them: one state machine for each device (pure)."""

from kvbus_prefill.slots import events
from kvbus_prefill.slots.entry import SlotLimits
from kvbus_prefill.slots.table import SlotTable

__all__ = ["SlotLimits", "SlotTable", "events"]
