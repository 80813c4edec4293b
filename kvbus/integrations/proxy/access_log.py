"""What became of each request: one log line at its end, and two metrics.

Each proxy has its own registry, so that a test may run several in one process.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import StrEnum

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

log = structlog.get_logger()


class RequestEnd(StrEnum):
    """How a request ended. Values are the labels of the metric."""

    COMPLETED = "completed"
    REFUSED = "refused"  # a status of 400 to 499
    FAILED = "failed"  # a status from 500 on, or a server that broke off
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    CLIENT_GONE = "client_gone"
    STOPPED = "stopped"  # the proxy was ended
    INTERNAL = "internal"


@dataclass
class RequestRecord:
    """What is known of one request so far; times are seconds."""

    request_id: str
    path: str
    prefill: str | None = None
    decode: str | None = None
    handover: str = "none"
    prefill_failures: list[str] = field(default_factory=list)
    prefill_s: float | None = None
    first_token_s: float | None = None
    status: int | None = None
    trouble: str | None = None
    outcome: RequestEnd | None = None
    _started_s: float = field(default_factory=time.perf_counter)

    @property
    def so_far_s(self) -> float:
        """How long ago the request came."""
        return round(time.perf_counter() - self._started_s, 6)

    def saw_bytes(self) -> None:
        """Bytes of the decode server's body came; the first count."""
        if self.first_token_s is None:
            self.first_token_s = self.so_far_s

    def ended(self, status: int) -> None:
        """The response's status decides the outcome, where nothing else did before."""
        self.status = status
        if self.outcome is None:
            if status < 400:
                self.outcome = RequestEnd.COMPLETED
            else:
                self.outcome = RequestEnd.REFUSED if status < 500 else RequestEnd.FAILED


class AccessLog:
    """Counts the requests of one proxy and logs each at its end."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.num_in_flight = 0
        self._requests = Counter(
            "kvbus_proxy_requests",
            "Requests that ended, by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in RequestEnd:
            self._requests.labels(outcome)
        gauge = Gauge(
            "kvbus_proxy_in_flight", "Requests that have not ended.", registry=self.registry
        )
        gauge.set_function(lambda: self.num_in_flight)

    @contextmanager
    def following(self, record: RequestRecord) -> Iterator[None]:
        """Count the request in, and out again with its line, whatever ends the block."""
        self.num_in_flight += 1
        try:
            yield
        except Exception:
            record.outcome = RequestEnd.INTERNAL
            log.exception("request.broken", request_id=record.request_id)
            raise
        finally:
            self.num_in_flight -= 1
            record.outcome = record.outcome or RequestEnd.STOPPED
            self._requests.labels(record.outcome).inc()
            shown = {one.name: getattr(record, one.name) for one in fields(record)[:-1]}
            log.info("request.ended", **shown, total_s=record.so_far_s)
