"""Events that agents publish: what became of offers, leases, fetches, engines, and of themselves.

An event may be lost: it says that something is to be asked, never that it is so.
"""

from kvbus.protocol.message import (
    EngineId,
    Epoch,
    FetchId,
    Message,
    OfferId,
    Size,
    Text,
    Tokens,
    event,
)


@event("heartbeat")
class Heartbeat(Message, frozen=True):
    """The agent is alive. It comes every two seconds (``heartbeat_s``)."""

    seqs: dict[str, Size]
    """The last ``seq`` of each topic."""


@event("offer.opened", "offer.extended", "offer.sealed", "offer.released")
class OfferEvent(Message, frozen=True):
    """An offer was opened, extended, sealed or released."""

    offer_id: OfferId
    num_tokens: Tokens
    """Tokens ready."""
    outcome: Text = ""
    """As in ``released``; empty while the offer lives."""


@event("lease.granted", "lease.revoked", "lease.expired", "lease.ended")
class LeaseEvent(Message, frozen=True):
    """A lease was granted; revoked by a withdrawal or a new claim; expired; or was ended by its
    reader.
    """

    offer_id: OfferId
    epoch: Epoch


@event("fetch.completed", "fetch.failed", "fetch.cancelled")
class FetchEvent(Message, frozen=True):
    """A fetch has ended."""

    fetch_id: FetchId
    request_id: Text
    """The request id in the ticket."""
    code: Text = ""
    """As in the reply to ``fetch``; empty when it completed."""


@event("engine.ready", "engine.lost")
class EngineEvent(Message, frozen=True):
    """An engine is complete and can be used, or is gone."""

    engine_id: EngineId
    engine_instance: Text = ""
    """As in tickets."""
