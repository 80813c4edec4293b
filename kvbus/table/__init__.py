"""The kit of the sans-IO state machines (pure): what offers, fetches, slots and reads share.

table         live and retired entries, transitions, deadlines, stories, one way to apply an event
urgent_first  who is next of those that wait
fair_pool     slots, and who waits for one, in fair turn
shares        who has how much of what is bounded, and who gives way when it is full
driver        feeds a table in an event loop, and runs its commands
events        events and commands that more than one table has
"""

from kvbus.table.driver import Driver
from kvbus.table.fair_pool import FairPool
from kvbus.table.shares import Party, Places, Shares
from kvbus.table.table import Context, Story, Table, Transition
from kvbus.table.urgent_first import Turns, UrgentFirst

__all__ = [
    "Context",
    "Driver",
    "FairPool",
    "Party",
    "Places",
    "Shares",
    "Story",
    "Table",
    "Transition",
    "Turns",
    "UrgentFirst",
]
