"""Offers, the leases on them, and the names that they are awaited by: one state machine (pure)."""

from kvbus_prefill.offer import events
from kvbus_prefill.offer.entry import OfferLimits, OfferState
from kvbus_prefill.offer.table import OfferTable

__all__ = ["OfferLimits", "OfferState", "OfferTable", "events"]
