"""Logs and counts the requests that an agent refuses; the bus counts those that it refuses."""

import structlog

from kvbus.agent.process.metrics import AgentMetrics
from kvbus.errors import KVBusError

log = structlog.get_logger()


def note_refusal(metrics: AgentMetrics, *, op: str, peer: str, error: KVBusError) -> None:
    """Log and count a refusal; whoever calls this sends it."""
    metrics.refusals.labels(error.code.value).inc()
    log.warning(
        "request.refused",
        op=op,
        peer_boot=peer,
        code=error.code.value,
        reason=error.message,
        **{f"detail_{name}": value for name, value in error.detail.items()},
    )
