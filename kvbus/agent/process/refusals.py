"""What is counted and logged of requests that were refused.

Not all of them mean that something is wrong: who reads ahead of a seal asks too early now and then
(``offer_open``), and asks again; a lease that is given back may have ended before. Whoever waits
for an offer that is not made yet is refused until it is, which is not counted (`TooEarly`).
"""

import structlog

from kvbus.agent.process.limited_log import LimitedLog
from kvbus.agent.process.metrics import AgentMetrics
from kvbus.bus import Call
from kvbus.errors import ErrorCode, KVBusError, TooEarly
from kvbus.protocol.peer import Release

log = structlog.get_logger()

_MISTAKES = (ErrorCode.FORBIDDEN, ErrorCode.INVALID)


class Refusals:
    """The refusals of one socket; each has lines of its own, so that strangers leave room."""

    def __init__(self, metrics: AgentMetrics, *, lines_s: int) -> None:
        self._metrics, self._lines = metrics, LimitedLog(lines_s=lines_s)

    def of_call(self, error: KVBusError, call: Call) -> None:
        """A call was refused."""
        self.note(call.op, call.session.boot[:8], error)

    def note(self, op: str, peer: str, error: KVBusError) -> None:
        """A request of ``peer``, the start of a boot id or a process, was refused."""
        if isinstance(error, TooEarly):
            return
        self._metrics.refusals.labels(error.code.value).inc()
        fields = {
            "op": op,
            "peer_boot": peer,
            "code": error.code.value,
            "reason": error.message,
            **{f"detail_{name}": value for name, value in error.detail.items()},
        }
        if op == Release.op and error.code not in _MISTAKES:
            log.debug("request.refused", **fields)  # the lease had ended by itself: so it should
        else:
            level = "info" if error.code is ErrorCode.OFFER_OPEN else "warning"
            self._lines.write("request.refused", who=peer, level=level, **fields)
