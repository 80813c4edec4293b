"""The state machine of all fetches (sans-IO)."""

from kvbus_decode.fetch import events
from kvbus_decode.fetch.entry import FetchLimits, FetchState
from kvbus_decode.fetch.events import Ahead
from kvbus_decode.fetch.table import FetchTable

__all__ = ["Ahead", "FetchLimits", "FetchState", "FetchTable", "events"]
