"""Offers and the leases on them: one state machine for all of them (pure)."""

from kvbus_prefill.offer import events
from kvbus_prefill.offer.entry import OfferedBox, OfferLimits, OfferState
from kvbus_prefill.offer.table import OfferTable

__all__ = ["OfferLimits", "OfferState", "OfferTable", "OfferedBox", "events"]
