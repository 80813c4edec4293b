"""What an agent remembers of a request, as spans; the request for it; the trace it belongs to."""

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec

from kvbus.protocol.engine import AgentRole
from kvbus.protocol.message import Discreet, Endpoint, Id, Message, Request, Text

MAX_SPANS = 512
"""Most spans in one answer."""
MAX_OTHERS = 64
Value = str | int | float


class Span(Discreet, frozen=True):
    """A time in which something went on; times in seconds of the agent's own clock.

    Spans are listed parents first: one of a greater ``depth`` is a part of the last one before it
    of a smaller. ``about`` says which of several, ``end_s`` is None while it goes on, ``error`` is
    what ended it.
    """

    name: Id
    start_s: float
    end_s: float | None = None
    depth: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    about: Text = ""
    error: Text = ""
    attributes: dict[str, Value] = msgspec.field(default_factory=dict)


class OtherAgent(Discreet, frozen=True):
    """Another agent that was part of it; ``server_key`` is its CURVE key, empty for none."""

    endpoint: Endpoint
    server_key: Text = ""


class Traced(Message, frozen=True):
    """Reply to `Trace`: what the agent remembers, the oldest first.

    ``now_s`` is the agent's clock, that of the spans, as it answered; ``wall_s`` are the seconds
    since 1970 then. ``cut`` says that there is more than fits into the reply.
    """

    agent_id: Id
    role: AgentRole
    boot: Id
    now_s: float
    wall_s: float
    spans: Annotated[tuple[Span, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()
    cut: bool = False
    others: Annotated[tuple[OtherAgent, ...], msgspec.Meta(max_length=MAX_OTHERS)] = ()


class Trace(Request[Traced], frozen=True):
    """Asks what went on for a request, an offer or a fetch; what has any of these names counts."""

    op: ClassVar[str] = "trace"

    request_id: Text = ""
    offer_id: Text = ""
    fetch_id: Text = ""


class Remembered(Discreet, frozen=True):
    """What a service says to `Trace`: the spans of each offer or fetch, the oldest one first."""

    entries: tuple[tuple[Span, ...], ...] = ()
    others: tuple[OtherAgent, ...] = ()

    def newest(self) -> tuple[tuple[Span, ...], bool]:
        """The spans of the newest ones that fit into a reply, and whether some do not."""
        kept: list[tuple[Span, ...]] = []
        num_left = MAX_SPANS
        for entry in reversed(self.entries):
            kept.insert(0, entry[:num_left])
            num_left -= len(kept[0])
        spans = tuple(span for entry in kept for span in entry)
        return spans, len(spans) < sum(map(len, self.entries))


_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The trace, the span that what we do is a part of, and whether somebody wants to see it."""

    trace_id: str
    span_id: str
    sampled: bool

    @classmethod
    def read(cls, text: str) -> "TraceParent | None":
        """What ``text`` says; None when it is no trace."""
        found = _FORM.fullmatch(text)
        if found is None:
            return None
        trace_id, span_id, flags = found.groups()
        if not (int(trace_id, 16) and int(span_id, 16)):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))

    @classmethod
    def first_of(cls, *texts: str) -> "TraceParent | None":
        """The first of ``texts`` that is a trace."""
        read = (cls.read(text) for text in texts if text)
        return next((one for one in read if one is not None), None)


def known_trace(*texts: str) -> str:
    """The first of ``texts`` that is a trace; empty when none is."""
    return next((text for text in texts if text and TraceParent.read(text) is not None), "")


def trace_attributes(*texts: str) -> dict[str, str]:
    """What a span says of the first of ``texts`` that is a trace."""
    text = known_trace(*texts)
    return {"traceparent": text} if text else {}
