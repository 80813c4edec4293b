"""The kit of the sans-IO state machines (pure): what offers, fetches, slots and reads share.

table         live and retired entries, transitions, deadlines, stories, one way to apply an event
fair          whose turn it is of those that wait, and who has which slot
shares        who has how much of what is bounded, and who gives way when it is full
driver        feeds a table in an event loop, and runs its commands
events        events and commands that more than one table has
"""

from kvbus.table.driver import Driver
from kvbus.table.fair import FAIR_TURN, FairPool, FairQueue, Key
from kvbus.table.shares import Party, Places, Shares
from kvbus.table.spans import (
    ASKED,
    FORGOTTEN,
    PENDING,
    Reading,
    asked_span,
    command_spans,
    forgotten_span,
    last_end,
    nested,
    pending_span,
    state_spans,
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

__all__ = [
    "ASKED",
    "FAIR_TURN",
    "FORGOTTEN",
    "KEPT_ANYWAY",
    "KEPT_S",
    "MAX_STEPS",
    "PENDING",
    "Context",
    "Deadlines",
    "Driver",
    "FairPool",
    "FairQueue",
    "Key",
    "Party",
    "Places",
    "Reading",
    "Shares",
    "Story",
    "Table",
    "Transition",
    "asked_span",
    "command_spans",
    "forgotten_span",
    "last_end",
    "nested",
    "pending_span",
    "state_spans",
]
