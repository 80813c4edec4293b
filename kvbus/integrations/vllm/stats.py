"""Statistics of loads and offers, for vLLM's log and for Prometheus."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Any, NamedTuple

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
"""Stage of a load that was refused before it was requested."""
SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
BYTES_BUCKETS = tuple(2.0**power for power in range(12, 38, 2))
_MIB = 2**20

Reading = float | str | tuple[str, str, float]
"""Labels, if any, and value. For a counter with a label: only the label."""


class Metric(NamedTuple):
    """A histogram if it has ``buckets``.

    Series of ``known`` labels exist from the start, as a rate would miss their first event.
    """

    key: str
    text: str
    labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


ENDS = (Outcome.COMPLETED, Outcome.FAILED, Outcome.CANCELLED)
STAGES = (REFUSED_AT, *StageTimes.__struct_fields__, "lost", "silent")
OFFER_ENDS = tuple(one for one in Outcome if one is not Outcome.CANCELLED)
SPENT = "Seconds that a load was in one stage."

METRICS = (
    Metric(LOADS, "Loads of KV that have ended.", ("outcome",), ENDS),
    Metric(LOADS_FAILED, "Loads of KV that failed, by stage.", ("stage",), STAGES),
    Metric(LOAD_SECONDS, "Seconds from asking for KV to its completion.", buckets=SECONDS_BUCKETS),
    Metric(LOAD_BYTES, "Bytes of KV that one load moved.", buckets=BYTES_BUCKETS),
    Metric(LOAD_STAGE_SECONDS, SPENT, ("stage", "outcome"), buckets=SECONDS_BUCKETS),
    Metric(OFFERS, "Offers of KV that were released.", ("outcome",), OFFER_ENDS),
    Metric(OFFERED_TOKENS, "Tokens whose KV was offered."),
    Metric(OFFERS_FAILED, "Requests without an offer."),
)

NIXL_METRICS = {
    LOAD_STAGE_SECONDS: ("nixl_xfer_time_seconds", ("reading", Outcome.COMPLETED.value)),
    LOAD_BYTES: ("nixl_bytes_transferred", ()),
    LOADS_FAILED: ("nixl_num_failed_transfers", ()),
    OFFERS: ("nixl_num_kv_expired_reqs", (Outcome.EXPIRED.value,)),
}
"""Names that dashboards know from vLLM's NixlConnector, and the labels of what they count."""


@dataclass
class KvbusStats(KVConnectorStats):
    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {metric.key: [] for metric in METRICS}

    def take(self) -> "KvbusStats | None":
        if self.is_empty():
            return None
        taken = KvbusStats(data=self.data)
        self.reset()
        return taken

    def add(self, key: str, reading: Reading) -> None:
        self.data[key].append(reading)

    def add_load(self, notice: Fetched, *, given_up: bool = False) -> None:
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
        for key, readings in other.data.items():
            self.data[key].extend(readings)
        return self

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
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
    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for key, text, labels, known, buckets in METRICS:
            kind: Any = self._histogram_cls if buckets else self._counter_cls
            options = {"buckets": buckets} if buckets else {}
            named = [*self._labelnames, *labels]
            made = kind(name=f"vllm:kvbus_{key}", documentation=text, labelnames=named, **options)
            self._metrics[key] = made
            for first in [[label] for label in known] if labels else [[]]:
                for engine_idx in per_engine_labelvalues:
                    self._series(key, engine_idx, first)
        self._has_nixl_names = False

    # A NixlConnector of the same vLLM registers its names whatever is there, and fails if they are.
    # So they are registered with the first handoff, when all connectors have been made.
    def _register_nixl_names(self) -> None:
        self._has_nixl_names = True
        for metric in METRICS:
            name, _ = NIXL_METRICS.get(metric.key, ("", ()))
            if not name:
                continue
            kind: Any = self._histogram_cls if metric.buckets else self._counter_cls
            options: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
            options |= {"name": f"vllm:{name}", "documentation": f"As vllm:kvbus_{metric.key}."}
            with suppress(ValueError):
                self._metrics[name] = kind(labelnames=self._labelnames, **options)
                for engine_idx in self.per_engine_labelvalues:
                    self._series(name, engine_idx, [])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if not self._has_nixl_names:
            self._register_nixl_names()
        for metric in METRICS:
            for reading in transfer_stats_data[metric.key]:
                labels, value = _parts(metric, reading)
                self._count(metric, metric.key, engine_idx, labels, value)
                name, counted = NIXL_METRICS.get(metric.key, ("", ()))
                if name in self._metrics and counted in ((), tuple(labels)):
                    self._count(metric, name, engine_idx, [], value)

    def _count(
        self, metric: Metric, key: str, engine_idx: int, labels: list[str], value: float
    ) -> None:
        series = self._series(key, engine_idx, labels)
        (series.observe if metric.buckets else series.inc)(value)

    def _series(self, key: str, engine_idx: int, labels: list[str]) -> Any:
        return self._metrics[key].labels(*self.per_engine_labelvalues[engine_idx], *labels)


def _parts(metric: Metric, reading: Any) -> tuple[list[str], float]:
    if metric.buckets:
        *labels, value = reading if metric.labels else (reading,)
        return labels, value
    return ([reading], 1) if metric.labels else ([], reading)
