"""What an agent remembers of a request, as spans, and the request for it."""

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
