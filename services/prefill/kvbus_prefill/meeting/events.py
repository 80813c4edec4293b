"""What can happen to a named offer, and what the agent is told to do about it.

Refuses behaviour: these are values. ``reply_to`` is whatever the agent uses to answer the request
that caused an event.
"""

from collections.abc import Mapping
from typing import Any

from kvbus.errors import KVBusError
from kvbus.table.events import DeadlinePassed, DrainStarted, Refuse, SendReply, Value

__all__ = [
    "Abandoned",
    "Awaited",
    "Command",
    "DeadlinePassed",
    "DrainStarted",
    "Ended",
    "EngineReady",
    "EnginesGone",
    "Event",
    "Forgone",
    "Made",
    "Refuse",
    "SendReply",
    "Withdraw",
]


class Awaited(Value, frozen=True):
    """A reader asks for the ticket, and waits ``wait_s`` for it."""

    transfer_id: str
    wait_s: float
    reply_to: object


class Abandoned(Value, frozen=True):
    """A reader that waits has been told to ask again, or is not there any more."""

    transfer_id: str
    reply_to: object


class Made(Value, frozen=True):
    """The engine has made the offer."""

    transfer_id: str
    offer_id: str
    ticket: Mapping[str, Any]


class Ended(Value, frozen=True):
    """The offer was released; ``error`` is what its ticket opens from now on."""

    offer_id: str
    error: KVBusError


class Forgone(Value, frozen=True):
    """Nobody will read the offer."""

    transfer_id: str
    reply_to: object


class EngineReady(Value, frozen=True):
    """An engine of the agent is ready to make offers."""


class EnginesGone(Value, frozen=True):
    """No engine of the agent is ready to make offers: the last one is lost, or none has come."""


Event = (
    Awaited
    | Abandoned
    | Made
    | Ended
    | Forgone
    | EngineReady
    | EnginesGone
    | DeadlinePassed
    | DrainStarted
)


class Withdraw(Value, frozen=True):
    """End the offer, and answer the request with how that went."""

    offer_id: str
    secret: str
    reply_to: object


Command = SendReply | Refuse | Withdraw
