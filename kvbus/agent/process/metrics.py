"""Prometheus metrics of a process.

Each agent has a registry of its own, so that a test may run several in one process.
"""

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

STAGE_BUCKETS_S = (
    0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
LAG_INTERVAL_S = 0.1
LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


class _Readings(Collector):
    """Gauges that are read when somebody looks, not kept up to date in between."""

    def __init__(self, read: Callable[[], dict[str, float]], meanings: dict[str, str]) -> None:
        self._read = read
        self._meanings = meanings

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, value in self._read().items():
            yield GaugeMetricFamily(f"kvbus_{name}", self._meanings[name], value=value)


class AgentMetrics:
    """The registry of one agent, with the metrics that both kinds of agent have."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.loop_lag_s = Histogram(
            "kvbus_event_loop_lag_seconds",
            "How much later than asked for the event loop ran a timer.",
            buckets=LAG_BUCKETS_S,
            registry=self.registry,
        )

        self.refusals = Counter(
            "kvbus_refusals",
            "Requests that were refused, by code.",
            ["code"],
            registry=self.registry,
        )

    async def watch_loop_lag(self) -> None:
        """Observe how late the event loop is, until cancelled; costs about 0.1 % of a core."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)  # less work than anyio's, ten times a second
            self.loop_lag_s.observe(max(0.0, loop.time() - due))

    def add_readings(self, read: Callable[[], dict[str, float]], meanings: dict[str, str]) -> None:
        """Serve what ``read`` returns at each look; ``meanings`` has a sentence for each name."""
        self.registry.register(_Readings(read, meanings))
