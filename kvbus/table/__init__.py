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
from kvbus.table.spans import (
    ASKED,
    FORGOTTEN,
    PENDING,
    TELLING,
    Reading,
    command_spans,
    forgotten_span,
    last_end,
    nested,
    pending_span,
    state_spans,
    way_spans,
)
from kvbus.table.table import (
    KEPT_ANYWAY,
    KEPT_S,
    MAX_STEPS,
    Context,
    Deadlines,
    Story,
    Table,
    Transition,
)
from kvbus.table.urgent_first import FAIR_TURN, Turns, UrgentFirst

__all__ = [
    "ASKED",
    "FAIR_TURN",
    "FORGOTTEN",
    "KEPT_ANYWAY",
    "KEPT_S",
    "MAX_STEPS",
    "PENDING",
    "TELLING",
    "Context",
    "Deadlines",
    "Driver",
    "FairPool",
    "Party",
    "Places",
    "Reading",
    "Shares",
    "Story",
    "Table",
    "Transition",
    "Turns",
    "UrgentFirst",
    "command_spans",
    "forgotten_span",
    "last_end",
    "nested",
    "pending_span",
    "state_spans",
    "way_spans",
]
