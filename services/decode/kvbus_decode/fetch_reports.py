"""Metrics, log line and spans of fetches."""

from collections.abc import Callable
from functools import partial

import structlog
from msgspec import structs

from kvbus.agent.observe import AgentMetrics
from kvbus.agent.spans import (
    Histories,
    Reading,
    forgotten_span,
    last_end,
    nested,
    pending_span,
    sending_span,
    state_spans,
)
from kvbus.errors import ErrorCode
from kvbus.planning import Path
from kvbus.protocol.engine import Outcome
from kvbus.protocol.tools import OtherAgent, Span, Status, Trace, TraceResult, trace_attributes
from kvbus.table.table import History
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import ENDS, STAGES, FetchEntry, FetchState
from kvbus_decode.fetch.table import FetchTable
from kvbus_decode.read_table import TransferState

log = structlog.get_logger()

READINGS = {
    "fetches": "Live fetches, draining ones included.",
    "parts": "Parts of fetches that are read for engines of another home.",
    "queued_fetches": "Fetches that wait for their turn.",
    "holds": "Offers that local engines hold for queued requests.",
    "waiting_requests": "Requests that wait for GPU work.",
    "draining_fetches": "Fetches that ended with transfers in flight.",
    "quarantined_blocks": "Blocks that a transfer can still write into.",
    "peers": "Connected prefill agents.",
    "silent_peers": "Prefill agents that do not answer pings.",
    "listed_peers": "Prefill agents in peers.",
    "connected_peers": "Prefill agents in peers that are ready.",
    "engines": "Local engines.",
    "slots": "Staging slots in use.",
    "ended_bytes": "Memory of records of ended fetches.",
    "mapped_bytes": "Mapped memory of prefill engines of this machine.",
}


class DecodeMetrics:
    def __init__(self, agent: AgentMetrics) -> None:
        self._handoffs = agent.tally("kvbus_handoffs", "Ended handoffs.", "outcome", "code")
        self._undecided = agent.tally(
            "kvbus_undecided_fetches",
            "Fetches that ended before the prefill agent confirmed or rejected their bytes.",
            "code",
        )
        self._retries = agent.tally(
            "kvbus_fetch_retries",
            "Failed attempts that were retried.",
            "code",
        )
        self._bytes = agent.tally("kvbus_read_bytes", "Bytes that ended fetches read.")
        self._stages_s = agent.times(
            "kvbus_stage_seconds",
            "Time of a handoff in a stage.",
            label="stage",
            of=[stage.value for stage in STAGES],
        )
        self._handoff_s = agent.times("kvbus_handoff_seconds", "Time from a fetch to its end.")
        self.digests = agent.tally(
            "kvbus_digests",
            "Compared pieces of KV.",
            "outcome",
        )

    def count_retry(self, code: str) -> None:
        self._retries.values[code,] += 1

    def observe(self, report: ev.ReportFetched) -> None:
        fetched = report.fetched
        self._handoffs.values[fetched.outcome.value, fetched.code] += 1
        if report.undecided:
            self._undecided.values[fetched.code,] += 1
        self._bytes.values[()] += fetched.num_bytes
        self._stages_s.add(structs.asdict(fetched.stages_s))
        self._handoff_s.add({"": fetched.stages_s.total})


def log_retry(ended: ev.EndAttempt) -> None:
    requested = ended.requested
    is_parked = ended.error.code is ErrorCode.OFFER_PARKED
    log.info(
        "handoff.moved" if is_parked else "handoff.retried",
        request_id=requested.ticket.request_id,
        fetch_id=requested.request.fetch_id,
        engine_id=requested.engine_id,
        attempt=ended.attempt,
        code=ended.error.code,
        reason=ended.error.message,
    )


def log_fetched(report: ev.ReportFetched) -> None:
    fetched = report.fetched
    failure: dict[str, str | bool] = {}
    if fetched.code:
        failure |= {"code": fetched.code, "reason": fetched.message}
    if report.undecided:
        failure["undecided"] = True
    stages_s = structs.asdict(fetched.stages_s)
    level = log.warning if fetched.outcome is Outcome.FAILED else log.info
    level(
        f"handoff.{fetched.outcome}",
        request_id=fetched.request_id,
        fetch_id=fetched.fetch_id,
        engine_id=report.requested.engine_id,
        stage=fetched.stage,
        num_bytes=fetched.num_bytes,
        path=fetched.path,
        speculative=report.requested.speculative is not None,
        leased=report.leased,
        attempts=fetched.attempts,
        blocks_free=fetched.blocks_free,
        total_ms=round(fetched.stages_s.total * 1e3, 3),
        **{f"{name}_ms": round(s * 1e3, 3) if s else 0.0 for name, s in stages_s.items()},
        **failure,
    )


FETCH = Reading(ends=ENDS, cuts=(ev.ReadChunk,))
TRANSFERS = Reading(
    ends=(TransferState.OVER,),
    names={
        ("", TransferState.READING): "READ",
        (TransferState.PACKING, TransferState.READING): "READ",
        (TransferState.QUEUED, TransferState.READING): "READ",
        (TransferState.READING, TransferState.COPYING): "scattering",
    },
)


class FetchHistories(Histories[FetchEntry]):
    def __init__(self, table: FetchTable, reads: Callable[[str], History | None]) -> None:
        super().__init__(table)
        self._table, self._reads = table, reads

    def lines(self, request: Status) -> list[str]:
        found = self._table.called(request.fetch_id)
        lines = [line for fetch in found for line in fetch.history.lines()]
        reads = [self._reads(fetch.key) for fetch in found]
        return lines + [f"read  {line}" for read in reads if read for line in read.lines()]

    def remembered(self, request: Trace) -> TraceResult:
        fetches = {one.key: one for one in self._table.named(request.request_id)}
        fetches |= {one.key: one for one in self._table.called(request.fetch_id)}
        entries = [tuple(self.later(fetch)()) for fetch in fetches.values()]
        tickets = [fetch.requested.ticket for fetch in fetches.values()]
        agents = {OtherAgent(ticket.endpoint, ticket.server_key): None for ticket in tickets}
        return TraceResult(tuple(entries), tuple(agents))

    def later(self, fetch: FetchEntry) -> Callable[[], list[Span]]:
        return partial(_spans, fetch, self._reads(fetch.key))


def _spans(fetch: FetchEntry, reads: History | None) -> list[Span]:
    history, requested = fetch.history, fetch.requested
    request_span = sending_span(history, requested.request.sent_s, depth=1)
    pending = [
        span for one in request_span for span in pending_span(requested.request.wanted_s, one)
    ]
    stages = request_span + forgotten_span(history, depth=1) + state_spans(history, FETCH, depth=1)
    started_at = stages[0].start_s if stages else history.started_at or 0.0
    root = Span(
        name="fetch",
        start_s=started_at,
        end_s=last_end(stages) or (started_at if not stages else None),
        error="" if fetch.error is None else f"{fetch.error.code}: {fetch.error.message}",
        attributes=_attributes(fetch),
    )
    if reads is not None:
        transfers = [span for span in state_spans(reads, TRANSFERS, depth=2) if span.about]
    else:
        transfers = _short_copy_spans(fetch, stages)
    return [root, *nested(stages, transfers), *pending]


def _short_copy_spans(fetch: FetchEntry, stages: list[Span]) -> list[Span]:
    """Return spans of short copies, which are not in the read table."""
    if fetch.path != Path.MAPPED:
        return []
    name, about = TransferState.COPYING.value, "transfer 0"
    return [
        Span(name, one.start_s, one.end_s, depth=2, about=about)
        for one in stages
        if one.name == FetchState.READING
    ]


def _attributes(fetch: FetchEntry) -> dict[str, str | int | float]:
    requested, ticket = fetch.requested, fetch.requested.ticket
    return {
        "request_id": ticket.request_id,
        "fetch_id": requested.request.fetch_id,
        "offer_id": ticket.offer_id,
        "engine_id": requested.engine_id,
        "state": fetch.state.value,
        "num_tokens": requested.request.num_tokens,
        "num_bytes": fetch.num_bytes,
        "attempts": fetch.num_failed,
        "path": fetch.path,
        "prefill_agent": ticket.agent_id,
        **trace_attributes(requested.request.traceparent, ticket.traceparent),
    }
