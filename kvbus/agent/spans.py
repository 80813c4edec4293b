"""Spans of an entry, made from its history: one span for each stay in a state.

steps   t0 queued   t1 acquiring   t2 reading   t3 reading, a new chunk   t4 completed
spans      ├ queued ┤├ acquiring ──┤├ reading ──┤├ reading ────────────────┤
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from kvbus.protocol.tools import Span, Status, Trace, TraceResult
from kvbus.table.table import History, Table

FORGOTTEN = "forgotten"
PENDING, MAX_PENDING_S = "pending", 86_400.0
"""In the engine before its request, and its longest plausible duration."""
SENDING, MAX_SENDING_S = "sending", 3600.0
"""Between an engine's request and its arrival, likewise."""


N = TypeVar("N")


class Histories(Generic[N]):
    def __init__(self, table: Table[Any, Any, Any, Any]) -> None:
        self._newest = table.newest

    def lines(self, request: Status) -> list[str]:
        raise NotImplementedError

    def remembered(self, request: Trace) -> TraceResult:
        raise NotImplementedError

    def later(self, entry: N) -> Callable[[], list[Span]]:
        """Return a maker for any thread, once the entry is over."""
        raise NotImplementedError

    def recent(self, number: int) -> list[Callable[[], list[Span]]]:
        newest = [(one, self.later(one)) for one in self._newest(number)]
        return [later if one.is_over else partial(list, later()) for one, later in newest]


@dataclass(frozen=True, slots=True)
class Reading:
    """States in ``ends`` make no span; a command in ``cuts`` begins a new one in the same state.

    ``names`` are by previous state and state.
    """

    ends: Collection[str]
    cuts: Collection[type] = ()
    names: Mapping[tuple[str, str], str] = field(default_factory=dict)


def state_spans(history: History, reading: Reading, *, depth: int) -> list[Span]:
    """Return spans sorted by start, without empty ones."""
    spans: list[Span] = []
    stays: dict[str, tuple[str, str, float]] = {}
    cuts = frozenset(reading.cuts)
    for now, about, _, state, commands, error in history.steps:
        previous = ""
        if (stay := stays.get(about)) is not None:
            _, previous, _ = stay
            if previous == state and not (cuts and cuts.intersection(commands)):
                continue
            spans.append(_span(stay, now, depth, about, error))
            del stays[about]
        if state not in reading.ends:
            name = reading.names.get((previous, state), state)
            stays[about] = name, str(state), now
    spans += [_span(stay, None, depth, about, "") for about, stay in stays.items()]
    spans = [span for span in spans if span.end_s != span.start_s or span.error]
    return sorted(spans, key=lambda span: span.start_s)


def command_spans(
    history: History, begins: type, ends: type, *, name: str, depth: int
) -> list[Span]:
    spans: list[Span] = []
    begun: deque[float] = deque()
    for now, _, _, _, commands, _ in history.steps:
        for kind in commands:
            if kind is begins:
                begun.append(now)
            elif kind is ends and begun:
                spans.append(Span(name, begun.popleft(), now, depth))
    return spans + [Span(name, start_s, None, depth) for start_s in begun]


def forgotten_span(history: History, *, depth: int) -> list[Span]:
    if history.started_at is None or history.steps[0][0] <= history.started_at:
        return []
    return [Span(FORGOTTEN, history.started_at, history.steps[0][0], depth)]


def sending_span(
    history: History, requested_at: float | None, *, depth: int, started_at: float | None = None
) -> list[Span]:
    """Return a span from the engine's request, at ``requested_at`` by its clock, to the start.

    Times of another time namespace make no span.
    """
    started_at = history.started_at if started_at is None else started_at
    if (
        requested_at is None
        or started_at is None
        or not 0 < started_at - requested_at <= MAX_SENDING_S
    ):
        return []
    return [Span(SENDING, requested_at, started_at, depth)]


def pending_span(wanted_at: float | None, sending: Span) -> list[Span]:
    if wanted_at is None or not 0 < sending.start_s - wanted_at <= MAX_PENDING_S:
        return []
    return [Span(PENDING, wanted_at, sending.start_s)]


def nested(parents: Iterable[Span], children: Iterable[Span]) -> list[Span]:
    """Insert each child after the last parent that began before it."""
    left, spans = deque(parents), list[Span]()
    for child in children:
        while left and left[0].start_s <= child.start_s:
            spans.append(left.popleft())
        spans.append(child)
    return spans + list(left)


def last_end(spans: Iterable[Span]) -> float | None:
    ends = [span.end_s for span in spans]
    return max((end for end in ends if end is not None), default=None) if None not in ends else None


def _span(
    stay: tuple[str, str, float], end_s: float | None, depth: int, about: str, error: str
) -> Span:
    name, _, start_s = stay
    return Span(name, start_s, end_s, depth, about, error)
