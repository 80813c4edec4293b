"""What an agent tells of itself at one time, at `/live` of its HTTP port."""

import msgspec

from kvbus.protocol.peer import AgentStatus
from kvbus.protocol.trace import Span


class Fault(msgspec.Struct, frozen=True):
    """One thing that is wrong, and what to do about it."""

    what: str
    do: str


class Live(msgspec.Struct, frozen=True):
    """The process ``boot`` of an agent at the time ``now_s`` of its clock, that of the spans.

    ``metrics`` are the samples of its Prometheus page, by name and labels as that writes them;
    ``recent`` has the spans of its newest offers or fetches. ``key_options`` are what a command
    needs on its line to ask this agent, here; empty without keys.
    """

    status: AgentStatus
    boot: str
    now_s: float
    faults: tuple[Fault, ...]
    metrics: dict[str, float]
    recent: tuple[tuple[Span, ...], ...]
    key_options: str = ""
