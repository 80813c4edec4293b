"""A table of the state of agents. Unknown values are None."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvbus.histograms import histogram_quantile
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.tools import Live, ProcessStatus, Sharing
from kvbus.text import bytes_text, rate_text, time_text

_LE = re.compile(r'le="([^"]+)"')
_STAGE = re.compile(r'kvbus_stage_seconds_count\{stage="([^"]+)"\}')


@dataclass(frozen=True, slots=True)
class Between:
    now: Live
    before: Live | None = None

    @property
    def seconds(self) -> float | None:
        """None if the agent has restarted."""
        if self.before is None or self.now.boot != self.before.boot:
            return None
        return self.now.now_s - self.before.now_s

    def rate(self, name: str, **labels: str) -> float | None:
        """Return growth per second, summed over all other labels; 0 without samples."""
        grown = sum(value for _, value in self._grown(name, labels))
        return max(0.0, grown) / self.seconds if self.seconds else None

    def spread(self, name: str, **labels: str) -> tuple[float, float] | None:
        """Return p50 and p99, in seconds, of the growth, or of all with one sample."""
        counts: dict[float, float] = {}
        for key, value in self._grown(f"{name}_bucket", labels):
            if bound := _LE.search(key):
                counts[float(bound[1])] = counts.get(float(bound[1]), 0.0) + value
        p50, p99 = (histogram_quantile(counts, part) for part in (0.5, 0.99))
        return None if math.isnan(p50) else (p50, p99)

    def _grown(self, name: str, labels: Mapping[str, str]) -> Iterator[tuple[str, float]]:
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        before = {} if self.before is None or self.seconds is None else self.before.metrics
        for key, value in self.now.metrics.items():
            if key.partition("{")[0] == name and all(one in key for one in wanted):
                yield key, value - before.get(key, 0.0)


View = Between | str


def screen(views: Mapping[str, View]) -> RenderableType:
    known = [view for view in views.values() if isinstance(view, Between)]
    parts: list[RenderableType] = [_table(known)] if known else []
    for at, view in views.items():
        if isinstance(view, str):
            parts.append(Text(f"\n{at}: {view}", "red", overflow="fold"))
            continue
        for fault in view.now.status.faults:
            parts.append(Text(f"\n{view.now.status.agent_id}: {fault.what}", "red"))
            parts.append(Text(f"  {fault.do}"))
    return Group(*parts)


def _table(views: Sequence[Between]) -> Table:
    table = Table("", box=SIMPLE_HEAD, show_edge=False)
    for view in views:
        table.add_column(view.now.status.agent_id, overflow="fold")
    for part in (_metric_rows, _holdings):
        columns = [dict(part(view)) for view in views]
        for name in dict.fromkeys(name for column in columns for name in column):
            cells = [column.get(name, "") for column in columns]
            if any(cells):
                table.add_row(name, *cells)
    return table


def _metric_rows(view: Between) -> Iterator[tuple[str, str]]:
    status, metrics = view.now.status, view.now.metrics
    yield "role", status.role
    yield "state", "draining" if status.draining else "serving"
    counter, duration, lost, moved = (
        ("kvbus_handoffs_total", "kvbus_handoff_seconds", "failed", "read")
        if status.role is AgentRole.DECODE
        else ("kvbus_offers_total", "kvbus_offer_life_seconds", "expired", "packed")
    )
    for label, value, formatted in (
        ("offers or handoffs a second", view.rate(counter), "{:,.1f}".format),
        ("expired or failed a second", view.rate(counter, outcome=lost), "{:,.1f}".format),
        (moved, view.rate(f"kvbus_{moved}_bytes_total"), rate_text),
        ("peers", metrics.get("kvbus_peers"), "{:.0f}".format),
        ("withheld blocks", metrics.get("kvbus_quarantined_blocks"), "{:.0f}".format),
    ):
        yield label, "" if value is None else formatted(value)
    stages = [found[1] for key in metrics if (found := _STAGE.fullmatch(key))]
    for label, percentiles in (
        ("loop lag, p50 / p99", view.spread("kvbus_event_loop_lag_seconds")),
        ("offer's life or handoff, p50 / p99", view.spread(duration)),
        *((f"  {stage}", view.spread("kvbus_stage_seconds", stage=stage)) for stage in stages),
    ):
        yield label, "" if percentiles is None else " / ".join(map(time_text, percentiles))


def _holdings(view: Between) -> Iterator[tuple[str, str]]:
    status = view.now.status
    for engine, is_ready in status.engines.items():
        yield f"engine {engine}", "ready" if is_ready else "not ready"
    if not status.engines:
        yield "engines", "none"
    for what, count in status.counts.items():
        yield what.replace("_", " "), str(count)
    for pool in status.pools.values():
        used, size = bytes_text(pool.used_bytes), bytes_text(pool.size_bytes)
        lost = "" if pool.is_attached else "; the engine is gone"
        yield f"pool of {pool.engine_id}", f"{pool.num_offers} offers, {used} of {size}{lost}"
    for endpoint, silent_s in status.silent_peers.items():
        yield f"peer {endpoint}", f"has not answered for {silent_s:.0f} s"
    yield from _process_rows(status.processes)
    sharing = status.sharing or Sharing()
    if status.sharing is not None:
        yield "NIXL listens at", ", ".join(status.data_endpoints) or "no TCP port"
    elif not view.now.boot:  # an HTTP port never reports it
        yield "NIXL listens at", "reported only to a trusted key, or to the user of the agent"
    if sharing.closed:
        yield "shared memory", sharing.closed
    if sharing.path:
        yield "lends memory at", sharing.path
    by_reason: dict[str, list[str]] = {}
    for engine, state in sharing.engines.items():
        by_reason.setdefault(state, []).append(engine)
    for engine in by_reason.pop("open", ()):
        yield f"memory of {engine}", "mapped here"
    for reason, engines in by_reason.items():
        who = engines[0] if len(engines) == 1 else f"{len(engines)} engines"
        yield f"memory of {who}", f"not mapped: {reason}"


def _process_rows(processes: Sequence[ProcessStatus]) -> Iterator[tuple[str, str]]:
    for one in processes:
        memory = bytes_text(one.memory_bytes)
        running = f"pid {one.pid}, {one.cpu_s:.1f} s of CPU, {memory}" if one.pid else "not running"
        yield f"{one.name} process", running
        for gpu, num_bytes in one.gpu_bytes.items():
            yield f"{one.name} process on {gpu}", bytes_text(num_bytes)
        if one.num_restarts:
            yield f"{one.name} restarts", f"{one.num_restarts}, last: {one.last_end}"
