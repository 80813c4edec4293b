"""The connector's figures as vLLM logs them, and as it exports them to Prometheus.

Refuses to measure: the figures are those of `kvbus.integrations.vllm.tally`.
"""

from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvbus.integrations.vllm import tally

SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
BYTES_BUCKETS = tuple(2.0**power for power in range(12, 38, 2))
_MIB = 2**20


@dataclass
class KvbusStats(KVConnectorStats):
    """Loads and offers of one logging interval."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.data: dict[str, Any] = dict(tally.no_figures())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add those of ``other`` to these."""
        for key, readings in other.data.items():
            self.data[key].extend(readings)
        return self

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        """One figure for each thing that a log line tells."""
        seconds: list[float] = self.data[tally.LOAD_SECONDS]
        num_bytes: list[float] = self.data[tally.LOAD_BYTES]
        figures: dict[str, int | float] = {
            "KV loads": len(seconds),
            "KV loads failed": len(self.data[tally.LOADS_FAILED]),
            "KV offers": len(self.data[tally.OFFERED_TOKENS]),
            "KV offers failed": len(self.data[tally.OFFERS_FAILED]),
        }
        if seconds:
            figures |= {
                "avg load (ms)": round(fmean(seconds) * 1e3, 3),
                "P90 load (ms)": round(_p90(seconds) * 1e3, 3),
                "avg MiB a load": round(fmean(num_bytes) / _MIB, 3),
                "MiB/s": round(sum(num_bytes) / _MIB / max(sum(seconds), 1e-9), 1),
            }
        return figures


class KvbusPromMetrics(KVConnectorPromMetrics):
    """``vllm:kvbus_*``, by engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._load_seconds = self._per_engine(
            self._histogram_cls(
                name="vllm:kvbus_load_seconds",
                documentation="Seconds from asking the agent for KV to its completion.",
                buckets=SECONDS_BUCKETS,
                labelnames=labelnames,
            )
        )
        self._load_bytes = self._per_engine(
            self._histogram_cls(
                name="vllm:kvbus_load_bytes",
                documentation="Bytes of KV that one load moved.",
                buckets=BYTES_BUCKETS,
                labelnames=labelnames,
            )
        )
        self._counters = {
            key: self._per_engine(
                self._counter_cls(name=name, documentation=text, labelnames=labelnames)
            )
            for key, name, text in (
                (tally.LOADS_FAILED, "vllm:kvbus_loads_failed", "Loads of KV that failed."),
                (tally.OFFERED_TOKENS, "vllm:kvbus_offered_tokens", "Tokens whose KV was offered."),
                (tally.OFFERS_FAILED, "vllm:kvbus_offers_failed", "Requests without an offer."),
            )
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's figures."""
        for metric, key in (
            (self._load_seconds, tally.LOAD_SECONDS),
            (self._load_bytes, tally.LOAD_BYTES),
        ):
            for reading in transfer_stats_data[key]:
                metric[engine_idx].observe(reading)
        for key, counter in self._counters.items():
            readings = transfer_stats_data[key]
            added = sum(readings) if key == tally.OFFERED_TOKENS else len(readings)
            counter[engine_idx].inc(added)

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        by_engine: dict[int, Any] = create_metric_per_engine(metric, self.per_engine_labelvalues)
        return by_engine


def _p90(readings: list[float]) -> float:
    return quantiles(readings, n=10)[-1] if len(readings) > 1 else readings[0]
