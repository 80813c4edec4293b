"""Prometheus metrics of a prefill agent.

Refuses labels without a bound: no request, offer or peer is a label.
"""

from prometheus_client import Counter, Histogram

from kvbus.agent.observe import STAGE_BUCKETS_S, AgentMetrics

READINGS = {
    "offers": "Offers that are live.",
    "leases": "Leases that are live.",
    "awaited_offers": "Requests for tickets of offers that have not been made yet.",
    "packs": "Boxes that wait for a staging slot.",
    "slots": "Staging slots in use.",
    "ended_bytes": "What is known of offers that have ended.",
    "engines": "Local engines.",
    "progress_tokens": "Reasons to drive NIXL's progress: live leases, late reads, handshakes.",
    "registered_bytes": "Memory registered with NIXL.",
    "memory_readers": "Maps of an engine's memory that decode agents of this machine have.",
}


class PrefillMetrics:
    """What became of offers and leases, how long offers lived, and what was packed."""

    def __init__(self, agent: AgentMetrics) -> None:
        registry = agent.registry
        self.offers = Counter(
            "kvbus_offers", "Offers that ended, by outcome.", ["outcome"], registry=registry
        )
        self.leases = Counter(
            "kvbus_leases", "Leases that ended, by reason.", ["reason"], registry=registry
        )
        self.offer_life_s = Histogram(
            "kvbus_offer_life_seconds",
            "Time from an offer to its release.",
            buckets=STAGE_BUCKETS_S,
            registry=registry,
        )
        self.packed_bytes = Counter(
            "kvbus_packed_bytes", "Bytes gathered into staging slots.", registry=registry
        )
        self.gather_s = Histogram(
            "kvbus_gather_seconds",
            "Time of one gather into a staging slot, in its thread.",
            buckets=STAGE_BUCKETS_S,
            registry=registry,
        )
