"""What can happen to offers, and what the agent is told to do about it.

Refuses behaviour: these are values. `kvbus_prefill.offer.table` says which event leads to which
command.
``reply_to`` is whatever the agent uses to answer the request that caused an event, ``holder`` the
CURVE key of who asks, empty without keys.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvbus.errors import ErrorCode
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import Outcome
from kvbus.protocol.message import Message
from kvbus.table.events import (
    DeadlinePassed,
    DrainStarted,
    EngineLost,
    Refuse,
    SendReply,
    Stopped,
    Value,
)

__all__ = [
    "BeginLease",
    "Claimed",
    "Command",
    "Confirmed",
    "DeadlinePassed",
    "DrainStarted",
    "EndLease",
    "EngineLost",
    "Event",
    "Extended",
    "Opened",
    "Publish",
    "Refuse",
    "Renewed",
    "ReportReleased",
    "RequestEvent",
    "Returned",
    "Sealed",
    "SendReply",
    "Stopped",
    "TableEvent",
    "Taken",
    "Withdrawn",
]


class Opened(Value, frozen=True):
    """The engine offers the KV of a request; ``ttl_s`` runs while nobody holds a lease.

    Whoever claims the offer, or withdraws it from outside, shows its ``secret``. The engine itself
    may name ``ticket_blocks`` of its blocks in the ticket. It is done when ``readers`` have all.
    ``traceparent`` is the trace of the request, empty for none; ``asked_s`` is when the engine
    asked by its own word.
    """

    offer_id: str
    engine_id: str
    request_id: str
    num_tokens: int
    tables: Mapping[str, BlockTable]
    sealed: bool
    ttl_s: float
    secret: str
    ticket: Mapping[str, Any]
    reply_to: object
    ticket_blocks: int = 0
    readers: int = 1
    traceparent: str = ""
    asked_s: float | None = None


class Extended(Value, frozen=True):
    """The engine has computed more; ``tables`` hold only what is new, ``num_tokens`` the sum."""

    offer_id: str
    num_tokens: int
    tables: Mapping[str, BlockTable]
    reply_to: object


class Sealed(Value, frozen=True):
    """The engine will add no more."""

    offer_id: str
    reply_to: object


class Withdrawn(Value, frozen=True):
    """The engine ends the offer, with None for the ``secret``; or a router, which shows it."""

    offer_id: str
    secret: str | None
    reply_to: object


class ReaderProcess(NamedTuple):
    """The process of the agent that reads; without a name when it does not say so."""

    agent_id: str = ""
    boot: str = ""

    def follows(self, other: "ReaderProcess") -> bool:
        """Whether it is another process of the same agent."""
        return bool(self.agent_id) and self.agent_id == other.agent_id and self.boot != other.boot


NAMELESS = ReaderProcess()


class Claimed(Value, frozen=True):
    """A reader that shows the offer's ``secret`` asks for the lease, which gets the ``token``."""

    offer_id: str
    secret: str
    reader_id: str
    lease_s: float
    token: str
    reply_to: object
    holder: str = ""
    process: ReaderProcess = NAMELESS


class Renewed(Value, frozen=True):
    """A reader asks for more time, and for the blocks that it does not know yet."""

    offer_id: str
    epoch: int
    token: str
    lease_s: float
    known_blocks: Mapping[str, int]
    reply_to: object
    holder: str = ""


class Confirmed(Value, frozen=True):
    """A reader has all bytes and asks whether its lease was live all along."""

    offer_id: str
    epoch: int
    token: str
    reply_to: object
    holder: str = ""


class Taken(Value, frozen=True):
    """A reader without a lease has all bytes of ``tables``, and asks whether they were good.

    It shows the offer's ``secret``; with the ``token``, its own, it can ask again.
    """

    offer_id: str
    secret: str
    reader_id: str
    token: str
    tables: Mapping[str, BlockTable]
    reply_to: object
    holder: str = ""
    process: ReaderProcess = NAMELESS


class Returned(Value, frozen=True):
    """A reader gives its lease back without having used it."""

    offer_id: str
    epoch: int
    token: str
    reply_to: object
    holder: str = ""


RequestEvent = (
    Opened | Extended | Sealed | Withdrawn | Claimed | Renewed | Confirmed | Taken | Returned
)
TableEvent = EngineLost | DrainStarted | Stopped | DeadlinePassed
Event = RequestEvent | TableEvent


class ReportReleased(Value, frozen=True):
    """Tell the engine that the offer's blocks are its own again."""

    engine_id: str
    offer_id: str
    request_id: str
    outcome: Outcome
    num_tokens: int
    opened_at: float


class Publish(Value, frozen=True):
    """Tell subscribers; ``op`` is the event's name on the wire."""

    op: str
    body: Message


class BeginLease(Value, frozen=True):
    """A reader may read from now on: its connection set-up and its READs need progress."""

    offer_id: str
    epoch: int


class EndLease(Value, frozen=True):
    """The lease is over, for whatever ``reason``: confirmed, returned, expired or revoked.

    ``code`` says it to a reader that still uses it.
    """

    offer_id: str
    epoch: int
    reason: str
    code: ErrorCode


Command = SendReply | Refuse | ReportReleased | Publish | BeginLease | EndLease
