"""What an agent remembers of a request, as spans; the request for it; the trace it belongs to."""

import re
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvbus.protocol.engine import AgentRole
from kvbus.protocol.message import (
    AgentId,
    Endpoint,
    Id,
    Message,
    Redacted,
    Request,
    Role,
    Scalar,
    ServerKey,
    Socket,
    Text,
    request,
)

MAX_SPANS = 512
"""Most spans in one answer."""
MAX_OTHERS = 64


class Span(Redacted, frozen=True):
    """A time in which something went on, by the agent's own clock."""

    name: Id
    """What went on: ``offer`` or ``fetch``, a state of one, or a step of a read."""
    start_s: float
    """When it began."""
    end_s: float | None = None
    """When it ended; nil while it goes on."""
    depth: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    """0 for an offer or a fetch. A span is a part of the last one before it of a smaller depth."""
    about: Text = ""
    """Which of several, such as the leg of a read; empty where there is one."""
    error: Text = ""
    """The error that ended it; empty for none."""
    attributes: dict[str, Scalar] = msgspec.field(default_factory=dict)
    """Plain values that say more."""


class OtherAgent(Redacted, frozen=True):
    """Another agent that has a part in what was asked for."""

    endpoint: Endpoint
    server_key: ServerKey = ""


class Traced(Message, frozen=True):
    agent_id: AgentId
    role: AgentRole
    boot: Id
    """Boot id of the agent."""
    now_s: float
    """The agent's clock as it answered, in seconds since any time."""
    wall_s: float
    """Seconds since 1970 then, as its machine believes."""
    spans: Annotated[tuple[Span, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()
    """What it remembers, the oldest first."""
    cut: bool = False
    """Whether it remembers more than fits: the oldest entries are left out."""
    others: Annotated[tuple[OtherAgent, ...], msgspec.Meta(max_length=MAX_OTHERS)] = ()
    """Agents that have a part in it."""


@request("trace", Socket.PREFILL_PEER, Socket.DECODE_PEER, askers=Role)
class Trace(Request[Traced], frozen=True):
    """Asks what went on for a request, an offer or a fetch, and what the agent's clock says; see
    [Traces](#traces).
    """

    request_id: Text = ""
    """A request, as its ticket or its rendezvous names it."""
    offer_id: Text = ""
    """An offer of this agent, or of another, which had boxes gathered here."""
    fetch_id: Text = ""
    """A fetch of this agent, or of another, which had a part of it read here."""


class Remembered(Redacted, frozen=True):
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


def known_trace(*texts: str) -> str:
    """The first of ``texts`` that is a trace; empty when none is."""
    return next((text for text in texts if text and TraceParent.read(text)), "")


def trace_attributes(*texts: str) -> dict[str, str]:
    """What a span says of the first of ``texts`` that is a trace."""
    text = known_trace(*texts)
    return {"traceparent": text} if text else {}
