"""Events that agents publish: what became of offers, leases, fetches, engines, and of themselves.

An event may be lost: it says that something is to be asked, never that it is so.
"""

from typing import ClassVar

from kvbus.protocol.message import Epoch, Id, Message, Size, Text, Tokens


class OfferEvent(Message, frozen=True):
    """Event ``offer.*``: opened, extended, sealed or released."""

    offer_id: Id
    num_tokens: Tokens
    outcome: Text = ""


class LeaseEvent(Message, frozen=True):
    """Event ``lease.*``: granted, revoked, expired or ended."""

    offer_id: Id
    epoch: Epoch


class FetchEvent(Message, frozen=True):
    """Event ``fetch.*``: completed, failed or cancelled."""

    fetch_id: Id
    request_id: Text
    code: Text = ""


class EngineEvent(Message, frozen=True):
    """Event ``engine.*``: ready or lost."""

    engine_id: Id
    engine_instance: Text = ""


class Heartbeat(Message, frozen=True):
    """Event ``heartbeat``: the agent is alive, and the last ``seq`` of each topic.

    ``reads`` is how many leases are live on its offers that have all their tokens.
    """

    op: ClassVar[str] = "heartbeat"

    seqs: dict[str, Size]
    uptime_s: float
    reads: Size = 0


EVENTS: dict[str, type[Message]] = {
    "heartbeat": Heartbeat,
    "offer.opened": OfferEvent,
    "offer.extended": OfferEvent,
    "offer.sealed": OfferEvent,
    "offer.released": OfferEvent,
    "lease.granted": LeaseEvent,
    "lease.revoked": LeaseEvent,
    "lease.expired": LeaseEvent,
    "lease.ended": LeaseEvent,
    "fetch.completed": FetchEvent,
    "fetch.failed": FetchEvent,
    "fetch.cancelled": FetchEvent,
    "engine.ready": EngineEvent,
    "engine.lost": EngineEvent,
}
