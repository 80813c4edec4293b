"""Configuration keys of a prefill agent."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvbus.agent.config import AgentConfig, Duration
from kvbus.protocol.ticket import MAX_TICKET_BLOCKS
from kvbus_prefill.offer.entry import OfferLimits


class PrefillConfig(AgentConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `kvbus-prefill`; every key but three has a default."""

    called: ClassVar[str] = "a prefill agent"

    offer_ttl_s: Duration = 120.0
    """Default time that an offer waits for a reader."""
    ticket_lifetime_s: Duration = 3600.0
    """Validity of a signed ticket; set it longer than offers wait or grow."""
    ticket_blocks: Annotated[int, Meta(ge=0, le=MAX_TICKET_BLOCKS)] = 1024
    """Most blocks of a sealed offer that its ticket lists, about 5.5 bytes each; a decode agent can
    read them immediately. 0: none."""
    max_lease_s: Duration = 30.0
    """Longest lease of one acquire or renewal."""
    max_hold_s: Duration = 600.0
    """Longest time that a reader may renew its lease, or that readers without a lease, queued or of
    an open offer, keep an offer."""
    late_read_s: Duration = 30.0
    """Time for which reads of an ended lease are still served, so that the reader gets its blocks
    back. A dead engine's addresses are kept as long."""
    shake_hands_ahead: Literal["keys", "anybody", "nobody"] = "keys"
    """Decode agents that may shake hands before they have a ticket: those with a trusted `decode`
    key (`keys`), `anybody` or `nobody`. After a handshake, an agent can read the engines' memory by
    NIXL."""

    park_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    """Pool for parked offers, for each engine: the agent copies blocks there, and the engine reuses
    them early. 0: none. It pays off only where decode is slower than prefill."""
    park_after_s: Annotated[float, Meta(ge=0, le=86_400)] = 1.0
    """Time that a sealed offer waits for its reader before it is parked."""

    @property
    def offer_limits(self) -> OfferLimits:
        return OfferLimits(
            max_offers=self.max_handoffs,
            max_lease_s=self.max_lease_s,
            max_hold_s=self.max_hold_s,
            max_retired_bytes=self.max_ended_bytes,
        )
