"""State machine of offers, their leases, and the names that readers await them by (pure)."""

from kvbus_prefill.offer import events
from kvbus_prefill.offer.entry import OfferLimits, OfferState
from kvbus_prefill.offer.table import OfferTable

__all__ = ["OfferLimits", "OfferState", "OfferTable", "events"]
