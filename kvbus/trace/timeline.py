"""The spans of all agents on one clock, and where the request's time went (pure)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from msgspec import structs

from kvbus.clocks import ClockOffset
from kvbus.errors import ErrorCode
from kvbus.protocol.tools import Span, Traced

FETCH, OFFER, AWAITED, PENDING = "fetch", "offer", "awaited", "pending"
PHRASES = {
    FETCH: {
        "sending": "on the way from the decode engine to its agent",
        "awaiting": "waiting for the prefill engine to make the offer",
        "resolving": "shaking hands with the prefill agent",
        "queued": "waiting for a turn behind other fetches",
        "acquiring": "waiting for the lease of the offer",
        "waiting": "waiting for prefill to compute",
        "reading": "reading",
        "committing": "confirming that the bytes are valid",
        "draining": "waiting for reads of a fetch that has ended",
        "forgotten": "steps that the agent does not keep",
    },
    OFFER: {
        "sending": "on the way from the prefill engine to its agent",
        "open": "computing the prompt, before a decode engine requested it",
        "sealed": "ready, but nobody fetched it",
        "forgotten": "steps that the agent does not keep",
    },
    PENDING: {PENDING: "waiting in the decode engine for its turn"},
    AWAITED: {AWAITED: "waiting for the prefill engine to make the offer"},
}
UNKNOWN = "nothing that an agent knows of"


@dataclass(frozen=True, slots=True)
class AgentTrace:
    """``spans`` are on our clock."""

    endpoint: str
    answer: Traced
    clock: ClockOffset
    spans: tuple[Span, ...] = ()

    @classmethod
    def of(cls, endpoint: str, answer: Traced, clock: ClockOffset) -> "AgentTrace":
        def moved(span: Span) -> Span:
            end_s = None if span.end_s is None else span.end_s + clock.offset_s
            return structs.replace(span, start_s=span.start_s + clock.offset_s, end_s=end_s)

        return cls(endpoint, answer, clock, tuple(map(moved, answer.spans)))


@dataclass(frozen=True, slots=True)
class Timeline:
    agents: tuple[AgentTrace, ...]
    start_s: float
    end_s: float

    @classmethod
    def of(cls, agents: Iterable[AgentTrace], *, now_s: float) -> "Timeline":
        def closed(span: Span) -> Span:
            return structs.replace(span, end_s=now_s) if span.end_s is None else span

        closed_traces = [
            replace(one, spans=tuple(map(closed, one.spans))) for one in agents if one.spans
        ]
        closed_traces.sort(key=lambda one: min(span.start_s for span in one.spans))
        spans = [span for one in closed_traces for span in one.spans]
        start_s = min((span.start_s for span in spans), default=now_s)
        return cls(tuple(closed_traces), start_s, max(map(end_of, spans), default=now_s))

    @property
    def total_s(self) -> float:
        return self.end_s - self.start_s

    # The fetch takes precedence over the offer, as the decode engine waits for the fetch:
    #
    #     offer     ├ open ────────┤├ sealed ─────────────────────────────────────────┤
    #     fetch             ├ sending ┤├ acquiring ┤├ waiting ┤├ reading ┤├ committing ┤
    #     the time  ├ open ┤├ sending ┤├ acquiring ┤├ waiting ┤├ reading ┤├ committing ┤
    def shares(self) -> dict[str, float]:
        """Return seconds by phrase, the largest first; they add up to `total_s`."""
        intervals = [interval for one in self.agents for interval in _intervals(one.spans)]
        bounds = (bound for one in intervals for bound in (one.start_s, one.end_s))
        times = sorted({self.start_s, self.end_s, *bounds})
        seconds: defaultdict[str, float] = defaultdict(float)
        for start_s, end_s in pairwise(times):
            found = [one for one in intervals if one.start_s <= start_s and end_s <= one.end_s]
            best = max(found, key=lambda one: one.rank, default=None)
            seconds[UNKNOWN if best is None else best.phrase] += end_s - start_s
        return dict(sorted(seconds.items(), key=lambda one: -one[1]))

    def verdict(self) -> str:
        shares = self.shares()
        phrase, seconds = next(iter(shares.items()), (UNKNOWN, 0.0))
        share = seconds / self.total_s if self.total_s else 0.0
        part = self._largest_part() if phrase == PHRASES[FETCH]["reading"] else ""
        return f"{share:.0%} of {self.total_s * 1e3:.3f} ms: {phrase}{part}"

    def _largest_part(self) -> str:
        parts: defaultdict[str, list[Span]] = defaultdict(list)
        for one in self.agents:
            for span in one.spans:
                if span.about.startswith("transfer"):
                    parts[span.name].append(span)
        if not parts:
            return ""
        name = max(parts, key=lambda part: covered_s(parts[part]))
        return f", most of it {name} ({covered_s(parts[name]) * 1e3:.3f} ms)"


def end_of(span: Span) -> float:
    return span.start_s if span.end_s is None else span.end_s


def covered_s(spans: Sequence[Span]) -> float:
    covered, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda one: one.start_s):
        end_s = end_of(span)
        covered += max(0.0, end_s - max(span.start_s, until))
        until = max(until, end_s)
    return covered


class _Interval(NamedTuple):
    rank: int
    start_s: float
    end_s: float
    phrase: str


_RANKS = {AWAITED: 0, OFFER: 1, PENDING: 2, FETCH: 3}


def _intervals(spans: Sequence[Span]) -> Iterator[_Interval]:
    root = ""
    for span in spans:
        root = span.name if span.depth == 0 else root
        phrase = PHRASES.get(root, {}).get(span.name)
        if phrase is not None and span.depth <= 1:
            yield _Interval(_RANKS[root], span.start_s, end_of(span), phrase)


def failure_of(timeline: Timeline) -> str:
    fetches = sorted(_fetches(timeline), key=lambda spans: spans[0].start_s)
    failed = [spans for spans in fetches if spans[0].error]
    if not failed:
        return ""
    whole, *parts = failed[-1]
    stage = next((one for one in parts if one.depth == 1 and one.error), None)
    after_ms = (end_of(stage or whole) - whole.start_s) * 1e3
    where = f" ({stage.name})" if stage else ""
    cancelled = whole.error.startswith(f"{ErrorCode.CANCELLED}:")
    how = "was cancelled" if cancelled else "failed"
    who = f"the fetch {how}"
    if len(fetches) > 1:
        who = f"{len(failed)} of {len(fetches)} fetches failed, the last"
    return f"{who} after {after_ms:.3f} ms{where}: {whole.error}"


def _fetches(timeline: Timeline) -> Iterator[Sequence[Span]]:
    for agent in timeline.agents:
        begins = [n for n, span in enumerate(agent.spans) if span.depth == 0]
        for begin, end in zip(begins, [*begins[1:], None], strict=True):
            if agent.spans[begin].name == FETCH:
                yield agent.spans[begin:end]
