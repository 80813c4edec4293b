"""Prometheus metrics of a decode agent.

Refuses labels without a bound: no request, fetch or peer is a label.
"""

from prometheus_client import Counter, Histogram

from kvbus.agent.process.metrics import STAGE_BUCKETS_S, AgentMetrics
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.state import STAGES

READINGS = {
    "fetches": "Fetches that are live, draining ones included.",
    "delegated_reads": "Chunks that are read for engines whose home is another agent.",
    "queued_fetches": "Fetches that wait for their turn.",
    "draining_fetches": "Fetches that ended while transfers were in flight.",
    "quarantined_blocks": "Blocks that are withheld because a transfer can still write into them.",
    "peers": "Prefill agents that this agent talks to.",
    "silent_peers": "Prefill agents that do not answer, and are tried now and then.",
    "silent_peer_refusals": "Fetches that were refused at once, as the prefill agent is silent.",
    "listed_peers": "Prefill agents that are listed in peers and peers_file.",
    "warm_peers": "Those of them that are ready for the first fetch, with an engine on both sides.",
    "engines": "Local engines.",
    "slots": "Staging slots in use.",
    "ended_bytes": "What is known of fetches that have ended.",
    "copies": "Copies out of slots, or of mapped memory, that have not ended.",
    "outstanding_handles": "NIXL handles that are not terminal.",
    "outstanding_bytes": "Bytes under NIXL handles that are not terminal.",
    "unreleased_handles": "NIXL handles that could not be given back.",
    "recycled_transports": "How often NIXL was made anew, as transfers never ended.",
    "recycled_timestamp_seconds": "When that was last, in seconds since 1970; 0: never.",
    "registered_bytes": "Memory registered with NIXL.",
    "mapped_bytes": "Memory of prefill engines of this machine that is mapped here.",
}


class DecodeMetrics:
    """What became of handoffs, how many bytes they moved, and where the time went."""

    def __init__(self, agent: AgentMetrics) -> None:
        registry = agent.registry
        self._handoffs = Counter(
            "kvbus_handoffs",
            "Handoffs that ended, by outcome and error code.",
            ["outcome", "code"],
            registry=registry,
        )
        self._undecided = Counter(
            "kvbus_undecided_fetches",
            "Fetches that ended before the prefill agent had answered whether their bytes are "
            "good, by error code: it may have completed the offer.",
            ["code"],
            registry=registry,
        )
        self._bytes = Counter(
            "kvbus_read_bytes", "Bytes that ended fetches have read.", registry=registry
        )
        self._stages_s = Histogram(
            "kvbus_stage_seconds",
            "Time that a handoff spent in a stage.",
            ["stage"],
            buckets=STAGE_BUCKETS_S,
            registry=registry,
        )
        self._handoff_s = Histogram(
            "kvbus_handoff_seconds",
            "Time from a fetch to its end.",
            buckets=STAGE_BUCKETS_S,
            registry=registry,
        )
        self.digests = Counter(
            "kvbus_digests",
            "Pieces of KV that were compared with the prefill engine's, by what came of it.",
            ["outcome"],
            registry=registry,
        )
        self._by_stage = {stage.value: self._stages_s.labels(stage.value) for stage in STAGES}

    def observe(self, fetched: ev.ReportFetched) -> float:
        """Count an ended fetch; returns the seconds that it took."""
        code = fetched.error.code.value if fetched.error else ""
        self._handoffs.labels(fetched.outcome.value, code).inc()
        if fetched.undecided:
            self._undecided.labels(code).inc()
        self._bytes.inc(fetched.num_bytes)
        total_s = 0.0
        for stage, histogram in self._by_stage.items():
            spent_s: float = getattr(fetched.stages_s, stage)
            total_s += spent_s
            if spent_s:
                histogram.observe(spent_s)
        self._handoff_s.observe(total_s)
        return total_s
