"""The kit of the sans-IO state machines (pure): what offers, fetches, slots and reads share.

table        live and retired entries, deadlines, one way to apply an event
transition   a handler and where it leads; what it may know of the world
story        the last events and commands of one entry
fair_pool    slots, and who waits for one, in fair turn
deadlines    one next deadline for each key
driver       feeds a table in an event loop, and runs its commands
events       events and commands that more than one table has
diagram      a table of transitions as a picture
"""

from kvbus.table.deadlines import Deadlines
from kvbus.table.driver import Driver
from kvbus.table.fair_pool import FairPool
from kvbus.table.story import Story
from kvbus.table.table import Entry, Table
from kvbus.table.transition import Context, Transition

__all__ = ["Context", "Deadlines", "Driver", "Entry", "FairPool", "Story", "Table", "Transition"]
