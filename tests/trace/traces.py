"""What agents would have answered."""

from kvbus.clocks import ClockOffset
from kvbus.protocol import AgentRole, Span, Traced
from kvbus.trace import AgentTrace


def agent(role: AgentRole, *spans: Span, offset_s: float = 0.0) -> AgentTrace:
    """An agent whose clock is behind ours by ``offset_s``."""
    answer = Traced(f"{role}-0", role, "boot", 0.0, 0.0, spans)
    return AgentTrace.of(f"tcp://{role}:1", answer, ClockOffset(offset_s, 0.0001))


def offer(*, offset_s: float = 0.0) -> AgentTrace:
    """Prefill computes from 0 to 4 s, and the offer ends at 9 s; of our clock."""
    spans = (
        Span("offer", 0.0, 9.0),
        Span("open", 0.0, 4.0, 1),
        Span("sealed", 4.0, 9.0, 1),
        Span("leased", 2.0, 9.0, 1),
        Span("gathering", 5.0, 6.0, 2, "box 1"),
    )
    return agent(AgentRole.PREFILL, *_behind(spans, offset_s), offset_s=offset_s)


def fetch(*, offset_s: float = 0.0) -> AgentTrace:
    """A fetch from 1 to 10 s of our clock."""
    spans = (
        Span("fetch", 1.0, 10.0),
        Span("claiming", 1.0, 2.0, 1),
        Span("waiting", 2.0, 4.5, 1),
        Span("reading", 4.5, 9.0, 1),
        Span("packing", 4.5, 6.0, 2, "leg 0"),
        Span("READ", 6.0, 8.5, 2, "leg 0"),
        Span("READ", 6.5, 9.0, 2, "leg 1"),
        Span("confirming", 9.0, 10.0, 1),
    )
    return agent(AgentRole.DECODE, *_behind(spans, offset_s), offset_s=offset_s)


REASON = "forbidden: the prefill agent at tcp://10.193.143.1:7701 is not connected to: its key " + (
    "!kL&e*WOay4[.yv!X*qU]X=]P-)wsdXjye^grwMr is not trusted here with the role 'prefill'"
)
"""Longer than a terminal is wide."""


def failed_fetch(*, at_s: float = 22.0, reason: str = REASON) -> AgentTrace:
    """A fetch that fails in its second stage, 1.7 ms after it began, and is told 10 ms later."""
    spans = (
        Span("fetch", at_s, at_s + 0.0117, 0, "", reason),
        Span("resolving", at_s, at_s + 0.001, 1),
        Span("claiming", at_s + 0.001, at_s + 0.0017, 1, "", reason),
        Span("telling", at_s + 0.0017, at_s + 0.0117, 1),
    )
    return agent(AgentRole.DECODE, *spans)


def unread_offer() -> AgentTrace:
    """An offer that is sealed for 22.8 s."""
    times = 0.0, 22.837028
    return agent(AgentRole.PREFILL, Span("offer", *times), Span("sealed", *times, 1))


def _behind(spans: tuple[Span, ...], by_s: float) -> tuple[Span, ...]:
    return tuple(
        Span(one.name, one.start_s - by_s, (one.end_s or 0.0) - by_s, one.depth, one.about)
        for one in spans
    )
