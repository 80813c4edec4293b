"""What became of loads and offers, as vLLM logs it and exports it to Prometheus; see `METRICS`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from kvbus.protocol.engine import Fetched, Outcome, StageTimes

LOADS = "loads"
LOAD_SECONDS = "load_seconds"
LOAD_BYTES = "load_bytes"
LOAD_STAGE_SECONDS = "load_stage_seconds"
LOADS_FAILED = "loads_failed"
OFFERS = "offers"
OFFERED_TOKENS = "offered_tokens"
OFFERS_FAILED = "offers_failed"

REFUSED_AT = "requested"
"""The stage of a load that was not even asked for."""
SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
BYTES_BUCKETS = tuple(2.0**power for power in range(12, 38, 2))
_MIB = 2**20

Reading = float | str | tuple[str, str, float]
"""The labels of a metric, if it has any, and its value; only the label of a counter with one."""


@dataclass(frozen=True)
class Metric:
    """``vllm:kvbus_{key}``, with labels of its own; a histogram if it has ``buckets``.

    The series of the labels ``known`` are there from the start: a counter that appears with its
    first event hides that event from a rate.
    """

    key: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    known: tuple[str, ...] = ()


METRICS = (
    Metric(
        LOADS,
        "Loads of KV that have ended.",
        labels=("outcome",),
        known=(Outcome.COMPLETED, Outcome.FAILED, Outcome.CANCELLED),
    ),
    Metric(
        LOADS_FAILED,
        "Loads of KV that failed, by stage.",
        labels=("stage",),
        known=(REFUSED_AT, *StageTimes.__struct_fields__, "lost", "silent"),
    ),
    Metric(LOAD_SECONDS, "Seconds from asking for KV to its completion.", buckets=SECONDS_BUCKETS),
    Metric(LOAD_BYTES, "Bytes of KV that one load moved.", buckets=BYTES_BUCKETS),
    Metric(
        LOAD_STAGE_SECONDS,
        "Seconds that a load was in one stage.",
        labels=("stage", "outcome"),
        buckets=SECONDS_BUCKETS,
    ),
    Metric(
        OFFERS,
        "Offers of KV that were released.",
        labels=("outcome",),
        known=(Outcome.COMPLETED, Outcome.WITHDRAWN, Outcome.EXPIRED, Outcome.FAILED),
    ),
    Metric(OFFERED_TOKENS, "Tokens whose KV was offered."),
    Metric(OFFERS_FAILED, "Requests without an offer."),
)


@dataclass
class KvbusStats(KVConnectorStats):
    """Readings by the key of a metric, since vLLM last asked for them."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget all readings."""
        self.data: dict[str, Any] = {metric.key: [] for metric in METRICS}

    def take(self) -> "KvbusStats | None":
        """The readings since the last call, None when there were none."""
        if self.is_empty():
            return None
        taken = KvbusStats(data=self.data)
        self.reset()
        return taken

    def add(self, key: str, reading: Reading) -> None:
        """One reading."""
        self.data[key].append(reading)

    def add_load(self, notice: Fetched, *, given_up: bool = False) -> None:
        """A load has ended; it was cancelled if vLLM had ``given_up`` its request before."""
        outcome = Outcome.CANCELLED if given_up else notice.outcome
        self.add(LOADS, outcome.value)
        if outcome is Outcome.COMPLETED:
            self.add(LOAD_SECONDS, notice.stages_s.total)
            self.add(LOAD_BYTES, notice.num_bytes)
        elif outcome is Outcome.FAILED:
            self.add(LOADS_FAILED, notice.stage)
        for stage, spent_s in msgspec.structs.asdict(notice.stages_s).items():
            if spent_s > 0:
                self.add(LOAD_STAGE_SECONDS, (stage, outcome.value, spent_s))

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the readings of ``other``."""
        for key, readings in other.data.items():
            self.data[key].extend(readings)
        return self

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        """The figures of vLLM's log line."""
        seconds: list[float] = self.data[LOAD_SECONDS]
        num_bytes: list[float] = self.data[LOAD_BYTES]
        failed = Counter(self.data[LOADS_FAILED])
        figures: dict[str, int | float] = {
            "KV loads": len(seconds),
            "KV loads failed": failed.total(),
            **{f"KV loads failed, {stage}": num for stage, num in failed.items()},
            "KV offers": len(self.data[OFFERED_TOKENS]),
            "KV offers failed": len(self.data[OFFERS_FAILED]),
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
            first = [[label] for label in metric.known] if metric.labels else [[]]
            for labels in first:
                for engine_idx in per_engine_labelvalues:
                    self._series(metric, engine_idx, labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the readings of one interval."""
        for metric in METRICS:
            for reading in transfer_stats_data[metric.key]:
                self._add(metric, reading, engine_idx)

    def _add(self, metric: Metric, reading: Any, engine_idx: int) -> None:
        if metric.buckets:
            *labels, value = reading if metric.labels else (reading,)
            self._series(metric, engine_idx, labels).observe(value)
        elif metric.labels:
            self._series(metric, engine_idx, (reading,)).inc()
        else:
            self._series(metric, engine_idx, ()).inc(reading)

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
