"""How the fetches of a timeline failed, in one line (pure)."""

from collections.abc import Iterator, Sequence

from kvbus.errors import ErrorCode
from kvbus.protocol.trace import Span
from kvbus.trace.timeline import FETCH, Timeline, end_of


def failure(timeline: Timeline) -> str:
    """How the last fetch that failed did, when, and in which stage; empty when none failed."""
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
    """The spans of each fetch, itself first."""
    for agent in timeline.agents:
        begins = [n for n, span in enumerate(agent.spans) if span.depth == 0]
        for begin, end in zip(begins, [*begins[1:], None], strict=True):
            if agent.spans[begin].name == FETCH:
                yield agent.spans[begin:end]
