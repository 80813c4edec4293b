"""The connector's figures as vLLM logs them, and as it exports them to Prometheus."""

from collections import Counter
from collections.abc import Sequence
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

from kvbus.integrations.vllm import stats
from kvbus.integrations.vllm.loads import REFUSED_AT
from kvbus.protocol.engine import Outcome, StageTimes

SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
BYTES_BUCKETS = tuple(2.0**power for power in range(12, 38, 2))
_MIB = 2**20

STAGE, OUTCOME = "stage", "outcome"
OF_LOADS = (Outcome.COMPLETED, Outcome.FAILED, Outcome.CANCELLED)
OF_OFFERS = (Outcome.COMPLETED, Outcome.WITHDRAWN, Outcome.EXPIRED, Outcome.FAILED)
STAGES = (REFUSED_AT, *StageTimes.__struct_fields__, "lost", "silent")


@dataclass(frozen=True)
class Metric:
    """``vllm:kvbus_{key}``, with labels of its own; a histogram if it has ``buckets``.

    Series of ``known`` are there from the start: a counter that appears with its first event hides
    that event from a rate.
    """

    key: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    known: tuple[str, ...] = ()


METRICS = (
    Metric(stats.LOADS, "Loads of KV that have ended.", (OUTCOME,), known=OF_LOADS),
    Metric(
        stats.LOAD_SECONDS, "Seconds from asking for KV to its completion.", buckets=SECONDS_BUCKETS
    ),
    Metric(stats.LOAD_BYTES, "Bytes of KV that one load moved.", buckets=BYTES_BUCKETS),
    Metric(
        stats.LOAD_STAGE_SECONDS,
        "Seconds that a load was in one stage.",
        (STAGE, OUTCOME),
        SECONDS_BUCKETS,
    ),
    Metric(stats.LOADS_FAILED, "Loads of KV that failed, by stage.", (STAGE,), known=STAGES),
    Metric(stats.OFFERS, "Offers of KV that were released.", (OUTCOME,), known=OF_OFFERS),
    Metric(stats.OFFERED_TOKENS, "Tokens whose KV was offered."),
    Metric(stats.OFFERS_FAILED, "Requests without an offer."),
)


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
        failed = Counter(self.data[stats.LOADS_FAILED])
        figures: dict[str, int | float] = {
            "KV loads": len(seconds),
            "KV loads failed": failed.total(),
            **{f"KV loads failed, {stage}": num for stage, num in failed.items()},
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
        self._metrics = {metric.key: self._make(metric) for metric in METRICS}
        for metric in METRICS:
            for engine_idx in per_engine_labelvalues:
                for label in metric.known or (() if metric.labels else (None,)):
                    self._series(metric, engine_idx, () if label is None else (label,))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's figures."""
        for metric in METRICS:
            for reading in transfer_stats_data[metric.key]:
                self._add(metric, reading, engine_idx)

    def _add(self, metric: Metric, reading: Any, engine_idx: int) -> None:
        if metric.buckets:
            *labels, value = reading if metric.labels else (reading,)
            self._series(metric, engine_idx, labels).observe(value)
            return
        labels = [reading] if metric.labels else []
        added = reading if metric.key == stats.OFFERED_TOKENS else 1
        self._series(metric, engine_idx, labels).inc(added)

    def _series(self, metric: Metric, engine_idx: int, labels: Sequence[str]) -> Any:
        return self._metrics[metric.key].labels(*self.per_engine_labelvalues[engine_idx], *labels)

    def _make(self, metric: Metric) -> Any:
        options: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
        kind: Any = self._histogram_cls if metric.buckets else self._counter_cls
        return kind(
            name=f"vllm:kvbus_{metric.key}",
            documentation=metric.text,
            labelnames=[*self._labelnames, *metric.labels],
            **options,
        )
