"""The hops of a handoff, out of the notes of all processes; pure.

Handoffs follow each other, so whatever is noted between two calls of `fetch` belongs to the first
of them, up to the next offer.

    FETCH ──▶ ... ──▶ COMPLETED ──▶ ... ──▶ the next OFFER ──▶ FETCH
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from rich.table import Table

from kvbus.bench.trace.recorder import Note

FETCH, COMPLETED, OFFER = "fetch is called", "completed() returns", "offer: sent"
Hop = tuple[str, str]
"""The process, and what happened there."""


@dataclass(frozen=True, slots=True)
class TracedHop:
    """One hop: when it happened in the median handoff, and how long after the row before.

    ``share`` is of the time until the KV is valid; None for what comes later. ``seen`` is the part
    of the handoffs that had it.
    """

    process: str
    what: str
    at_us: float
    took_us: float
    share: float | None
    seen: float


def traced_hops(
    notes: Mapping[str, Sequence[Note]], *, skip: int = 0, rare: float = 0.5
) -> list[TracedHop]:
    """The median handoff, hop by hop, in the order in which they happen; the first are skipped.

    What fewer than ``rare`` of the handoffs have is left out: a heartbeat that fell in.
    """
    handoffs = list(_handoffs(notes))[skip:]
    times: defaultdict[Hop, list[float]] = defaultdict(list)
    for handoff in handoffs:
        for hop, at_us in handoff.items():
            times[hop].append(at_us)
    usual = {hop: at for hop, at in times.items() if len(at) >= rare * len(handoffs)}
    order = sorted(usual, key=lambda hop: median(usual[hop]))
    ends = [hop for hop in order if hop[1] == COMPLETED]
    total_us = median(usual[ends[0]]) if ends else 0.0
    before = [order[0], *order] if order else []
    return [
        _traced(hop, earlier, usual, handoffs, total_us=total_us)
        for earlier, hop in zip(before, order, strict=False)
    ]


def _traced(
    hop: Hop,
    earlier: Hop,
    usual: Mapping[Hop, Sequence[float]],
    handoffs: Sequence[Mapping[Hop, float]],
    *,
    total_us: float,
) -> TracedHop:
    both = [one for one in handoffs if hop in one and earlier in one]
    took_us = median(one[hop] - one[earlier] for one in both) if both else 0.0
    at_us = median(usual[hop])
    share = took_us / total_us if total_us > 0 and at_us <= total_us else None
    return TracedHop(*hop, at_us, took_us, share, len(usual[hop]) / len(handoffs))


def _handoffs(notes: Mapping[str, Sequence[Note]]) -> Iterator[dict[Hop, float]]:
    """Of each handoff the microseconds from its fetch to each hop; a second one has a number."""
    merged = sorted((at, process, what) for process, some in notes.items() for at, what in some)
    starts = [number for number, (_, _, what) in enumerate(merged) if what == FETCH]
    for start, stop in pairwise([*starts, len(merged)]):
        yield _one_handoff(merged[start:stop])


def _one_handoff(merged: Iterable[tuple[int, str, str]]) -> dict[Hop, float]:
    began: int | None = None
    handoff: dict[Hop, float] = {}
    counts: Counter[Hop] = Counter()
    for at, process, what in merged:
        if what == OFFER:
            break
        began = at if began is None else began
        counts[process, what] += 1
        number = counts[process, what]
        handoff[process, what if number == 1 else f"{what} ({number})"] = (at - began) / 1e3
    return handoff


def trace_rows(hops: Sequence[TracedHop]) -> list[dict[str, Any]]:
    """All of it, for JSON."""
    return [
        {
            "process": hop.process,
            "what": hop.what,
            "at_us": round(hop.at_us, 1),
            "took_us": round(hop.took_us, 1),
            "share": None if hop.share is None else round(hop.share, 4),
            "seen": round(hop.seen, 3),
        }
        for hop in hops
    ]


def trace_table(hops: Sequence[TracedHop]) -> Table:
    """All of it, for people."""
    table = Table("process", "hop", box=None, pad_edge=False)
    for heading in ("at, µs", "took, µs", "share"):
        table.add_column(heading, justify="right")
    for hop in hops:
        share = "" if hop.share is None else f"{hop.share:.1%}"
        ends = hop.what == COMPLETED
        style = "bold" if ends or hop.what == FETCH else None
        row = hop.process, hop.what, f"{hop.at_us:,.0f}", f"{hop.took_us:,.0f}", share
        table.add_row(*row, style=style, end_section=ends)
    return table
