"""Says no to a request: to the one who asked, in the log, and in a counter.

Refuses silence: every refusal of an agent goes through here, or is counted by the bus.
"""

import structlog

from kvbus.agent.process.metrics import AgentMetrics
from kvbus.bus import Call
from kvbus.errors import ErrorCode, KVBusError, ProtocolError

log = structlog.get_logger()


def refuse(metrics: AgentMetrics, call: Call, error: KVBusError) -> None:
    """Answer ``call`` with ``error``."""
    note_refusal(metrics, op=call.op, peer=call.session.boot, error=error)
    call.refuse(error)


def note_refusal(metrics: AgentMetrics, *, op: str, peer: str, error: KVBusError) -> None:
    """Log and count a refusal that is answered elsewhere."""
    metrics.refusals.labels(error.code.value).inc()
    log.warning(
        "request.refused",
        op=op,
        peer_boot=peer,
        code=error.code.value,
        reason=error.message,
        **{f"detail_{name}": value for name, value in error.detail.items()},
    )


def unknown_op(call: Call) -> ProtocolError:
    """The refusal of a request that this socket does not know."""
    return ProtocolError(f"no request '{call.op}' here", code=ErrorCode.UNKNOWN_OP)
