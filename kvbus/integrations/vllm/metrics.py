"""The connector's figures as vLLM logs them, and as it exports them to Prometheus."""

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

from kvbus.integrations.vllm import stats

SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
BYTES_BUCKETS = tuple(2.0**power for power in range(12, 38, 2))
HISTOGRAMS = {
    stats.LOAD_SECONDS: ("Seconds from asking for KV to its completion.", SECONDS_BUCKETS),
    stats.LOAD_BYTES: ("Bytes of KV that one load moved.", BYTES_BUCKETS),
}
COUNTERS = {
    stats.LOADS_FAILED: "Loads of KV that failed.",
    stats.OFFERED_TOKENS: "Tokens whose KV was offered.",
    stats.OFFERS_FAILED: "Requests without an offer.",
}
_MIB = 2**20


@dataclass
class KvbusStats(KVConnectorStats):
    """Loads and offers of one logging interval."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.data: dict[str, Any] = dict(stats.no_figures())

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
        seconds: list[float] = self.data[stats.LOAD_SECONDS]
        num_bytes: list[float] = self.data[stats.LOAD_BYTES]
        figures: dict[str, int | float] = {
            "KV loads": len(seconds),
            "KV loads failed": len(self.data[stats.LOADS_FAILED]),
            "KV offers": len(self.data[stats.OFFERED_TOKENS]),
            "KV offers failed": len(self.data[stats.OFFERS_FAILED]),
        }
        if seconds:
            p90 = quantiles(seconds, n=10)[-1] if len(seconds) > 1 else seconds[0]
            figures |= {
                "avg load (ms)": round(fmean(seconds) * 1e3, 3),
                "P90 load (ms)": round(p90 * 1e3, 3),
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
        self._histograms = {
            key: self._by_engine(self._histogram_cls, key, text, labelnames, buckets=buckets)
            for key, (text, buckets) in HISTOGRAMS.items()
        }
        self._counters = {
            key: self._by_engine(self._counter_cls, key, text, labelnames)
            for key, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's figures."""
        for key, histogram in self._histograms.items():
            for reading in transfer_stats_data[key]:
                histogram[engine_idx].observe(reading)
        for key, counter in self._counters.items():
            readings = transfer_stats_data[key]
            added = sum(readings) if key == stats.OFFERED_TOKENS else len(readings)
            counter[engine_idx].inc(added)

    def _by_engine(
        self, kind: Any, key: str, text: str, labelnames: list[str], **options: Any
    ) -> dict[int, Any]:
        metric = kind(
            name=f"vllm:kvbus_{key}", documentation=text, labelnames=labelnames, **options
        )
        by_engine: dict[int, Any] = create_metric_per_engine(metric, self.per_engine_labelvalues)
        return by_engine
