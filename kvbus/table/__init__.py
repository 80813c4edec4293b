"""The kit of the sans-IO state machines (pure): what offers, fetches, slots and reads share.

table         live and retired entries, transitions, deadlines, stories, one way to apply an event,
              and what drives a table in an event loop
events        events and commands that more than one table has
"""

from kvbus.fair import FAIR_TURN, FairPool, FairQueue, Key, Party, Places
from kvbus.table.table import Context, Driver, Promise, Story, Table, Transition, transitions

__all__ = [
    "FAIR_TURN",
    "Context",
    "Driver",
    "FairPool",
    "FairQueue",
    "Key",
    "Party",
    "Places",
    "Promise",
    "Story",
    "Table",
    "Transition",
    "transitions",
]
