"""A timeline in the trace event format, which Perfetto and chrome://tracing read (pure).

Each agent is a process. Spans of one lane lie side by side or in each other, as the format wants.
"""

from typing import Any

import msgspec

from kvbus.protocol.trace import Span
from kvbus.trace.timeline import Timeline, end_of

US_OF_S = 1e6


def chrome_file(timeline: Timeline, title: str) -> bytes:
    """The JSON of the file; its times count from the start of the timeline."""
    events: list[dict[str, Any]] = []
    for pid, agent in enumerate(timeline.agents, 1):
        name = f"{agent.answer.role} {agent.answer.agent_id}"
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        for lane, spans in enumerate(_lanes(agent.spans)):
            events += [_event(span, pid, lane, timeline.start_s) for span in spans]
    return msgspec.json.encode({"traceEvents": events, "otherData": {"request": title}})


def _event(span: Span, pid: int, lane: int, start_s: float) -> dict[str, Any]:
    args = dict(span.attributes)
    args |= {"error": span.error} if span.error else {}
    return {
        "ph": "X",
        "name": f"{span.name} {span.about}".rstrip(),
        "cat": "kvbus",
        "pid": pid,
        "tid": lane,
        "ts": (span.start_s - start_s) * US_OF_S,
        "dur": (end_of(span) - span.start_s) * US_OF_S,
        "args": args,
    }


def _lanes(spans: tuple[Span, ...]) -> list[list[Span]]:
    """Each span in the first lane in which it overlaps no other in part."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: (one.start_s, one.depth, -end_of(one))):
        lane = next((one for one in lanes if _fits(span, one)), None)
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    return lanes


def _fits(span: Span, lane: list[Span]) -> bool:
    before = (one for one in lane if end_of(one) > span.start_s)
    return all(end_of(span) <= end_of(one) for one in before)
