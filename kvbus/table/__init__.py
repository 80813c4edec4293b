"""The base of the sans-IO state machines (pure), for offers, fetches, slots and reads.

table         live and retired entries, transitions, deadlines, histories, one way to apply an
              event, and the driver of a table in an event loop
events        events and commands that several tables share
"""

from kvbus.fair import FAIR_TURN, FairPool, FairQueue, Key, Permits, Tenant
from kvbus.table.table import Context, Driver, History, Promise, Table, Transition, transitions

__all__ = [
    "FAIR_TURN",
    "Context",
    "Driver",
    "FairPool",
    "FairQueue",
    "History",
    "Key",
    "Permits",
    "Promise",
    "Table",
    "Tenant",
    "Transition",
    "transitions",
]
