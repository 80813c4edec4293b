"""Messages for routers and tools: an agent's status, what a handoff costs, traces, and events.

An event may be lost: it says that something is to be asked, never that it is so.
"""

import re
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvbus.protocol.engine import AgentRole
from kvbus.protocol.message import (
    MAX_TEXT_CHARS,
    AgentId,
    Endpoint,
    EngineId,
    Epoch,
    FetchId,
    Id,
    Message,
    OfferId,
    Redacted,
    Request,
    Role,
    Scalar,
    ServerKey,
    Size,
    Socket,
    Text,
    Tokens,
    event,
    request,
)

MAX_SPANS = 512
"""Most spans in one answer."""
MAX_OTHERS = 64
AnySeconds = Annotated[float, msgspec.Meta(ge=0)]
Echo = Annotated[str, msgspec.Meta(max_length=2 * MAX_TEXT_CHARS)]
"""Comes back as it is: a large answer."""


class PeerView(msgspec.Struct, frozen=True):
    """What an agent knows of another one, and its own key."""

    server_key: ServerKey = ""
    roles: tuple[Text, ...] = ()
    """What the agent trusts ``key`` as, if anything."""
    listed: bool = False
    """Whether ``peer`` is in the configuration of a decode agent."""
    warm: bool = False
    """Whether that is ready for the first fetch."""
    num_routes: Size = 0
    """Routes from engines of ``peer``, made by handshakes."""
    problem: Text = ""
    """Why it is not warm, or why the last handshake failed, for people."""


class Sharing(msgspec.Struct, frozen=True):
    """What an agent says of memory that it lends or maps; see [Memory socket](#memory-socket)."""

    machine: Text = ""
    """Boot id of the agent's kernel."""
    uid: Size = 0
    """User of the agent's process."""
    mount_namespace: Text = ""
    """Its mount namespace, if the kernel names it."""
    pid_namespace: Text = ""
    """Its PID namespace: UCX reads the memory of another one over TCP."""
    path: Text = ""
    """Path of a prefill agent's memory socket; empty when it has none."""
    closed: Text = ""
    """Why it neither lends nor maps anything, for people; empty when it may."""
    engines: dict[str, Text] = {}
    """Of each engine that a decode agent has met ``open``, or why its memory is not mapped."""


class Fault(msgspec.Struct, frozen=True):
    """One thing that is wrong at an agent."""

    what: Text
    """What is wrong, for people."""
    do: Text
    """What to do about it."""


class ProcessStatus(msgspec.Struct, frozen=True):
    """One process of an agent."""

    name: Text
    """``control``, or ``data`` that moves the KV."""
    pid: Size = 0
    """0 while it does not run."""
    cpu_s: AnySeconds = 0.0
    """CPU time since it was started."""
    memory_bytes: Size = 0
    """Memory, without KV and other shared memory."""
    num_restarts: Size = 0
    """How often it was started again."""
    last_end: Text = ""
    """Why the one before ended, for people."""


class AgentStatus(Message, frozen=True):
    agent_id: AgentId
    role: AgentRole
    engines: dict[str, bool]
    """Engine ids, and whether each is ready."""
    draining: bool
    """Whether it takes no new offers or fetches."""
    counts: dict[str, int]
    """How many offers, leases, fetches and the like it holds."""
    data_endpoints: tuple[Text, ...] = ()
    """HOST:PORT of each TCP socket at which the agent's NIXL listens. Only for senders with a key,
    or of the same user (or root) on this machine, as ``sharing``."""
    story: tuple[Text, ...] = ()
    """The last events of the fetch or offer that was asked for, for people."""
    sharing: Sharing | None = None
    """Whether memory is shared with agents of the same machine."""
    silent_peers: dict[str, float] = msgspec.field(default_factory=dict)
    """Agents that do not answer pings, by endpoint: for how many seconds."""
    engine_instances: dict[str, str] = msgspec.field(default_factory=dict)
    """Of each engine, its ``engine_instance`` in tickets."""
    peer_endpoint: Text = ""
    """Where others reach this socket: the ``endpoint`` in tickets."""
    events_endpoint: Text = ""
    """Where its events are."""
    echo: Echo = ""
    view: PeerView | None = None
    """What the agent knows of the ``peer`` that it was asked about."""
    faults: tuple[Fault, ...] = ()
    """What is wrong now, if that was asked for. Only for the senders that are told ``sharing``."""
    processes: tuple[ProcessStatus, ...] = ()
    """The agent's processes. Only for the senders that are told ``sharing``."""


@request("status", Socket.PREFILL_PEER, Socket.DECODE_PEER, askers=Role)
class Status(Request[AgentStatus], frozen=True):
    """Asks what an agent holds now; a subscriber resyncs with it."""

    fetch_id: Text = ""
    """A fetch of this decode agent whose story is wanted."""
    offer_id: Text = ""
    """An offer of this prefill agent whose story is wanted."""
    echo: Echo = ""
    peer: Text = ""
    """Endpoint of another agent whose ``view`` is wanted; or only its ``key``."""
    key: Text = ""
    """CURVE key of that agent, in Z85."""
    faults: bool = False
    """Whether the ``faults`` are wanted."""


class Predicted(Message, frozen=True):
    predicted_s: AnySeconds
    """Seconds from the request of the fetch to its end."""
    num_bytes: Size
    """Bytes that it would move."""
    decode_engine: EngineId
    path: Text = ""
    """How it would be read. Empty where the engines have not met: it is a guess then."""
    num_observed: Size = 0
    """How many handoffs from there on this path have corrected it."""


@request(
    "cost",
    Socket.DECODE_PEER,
    askers=(Role.DECODE, Role.ROUTER, Role.OBSERVER),
    refusals="engine_unknown engine_not_ready",
)
class Cost(Request[Predicted], frozen=True):
    """Asks a decode agent what a fetch would take now, for routers. It changes nothing."""

    endpoint: Endpoint
    """The prefill agent's, as in its tickets."""
    num_tokens: Tokens
    """Tokens of the request, with those in the decode engine's cache."""
    first_token: Tokens = 0
    """How many of them the decode engine has already."""
    prefill_engine: Text = ""
    """May be empty where the two agents know one."""
    decode_engine: Text = ""
    """May be empty where this agent has one."""


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


class Live(msgspec.Struct, frozen=True):
    """The process ``boot`` of an agent at the time ``now_s`` of its clock, that of the spans.

    ``metrics`` are the samples of its Prometheus page, by name and labels as that writes them;
    ``recent`` has the spans of its newest offers or fetches. ``key_options`` are what a command
    needs on its line to ask this agent, here; empty without keys.
    """

    status: AgentStatus
    boot: str
    now_s: float
    metrics: dict[str, float]
    recent: tuple[tuple[Span, ...], ...]
    key_options: str = ""


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


@event("heartbeat")
class Heartbeat(Message, frozen=True):
    """The agent is alive. It comes every two seconds (``heartbeat_s``)."""

    seqs: dict[str, Size]
    """The last ``seq`` of each topic."""


@event("offer.opened", "offer.extended", "offer.sealed", "offer.released")
class OfferEvent(Message, frozen=True):
    """An offer was opened, extended, sealed or released."""

    offer_id: OfferId
    num_tokens: Tokens
    """Tokens ready."""
    outcome: Text = ""
    """As in ``released``; empty while the offer lives."""


@event("lease.granted", "lease.revoked", "lease.expired", "lease.ended")
class LeaseEvent(Message, frozen=True):
    """A lease was granted; revoked by a withdrawal or a new claim; expired; or was ended by its
    reader.
    """

    offer_id: OfferId
    epoch: Epoch


@event("fetch.completed", "fetch.failed", "fetch.cancelled")
class FetchEvent(Message, frozen=True):
    """A fetch has ended."""

    fetch_id: FetchId
    request_id: Text
    """The request id in the ticket."""
    code: Text = ""
    """As in the reply to ``fetch``; empty when it completed."""


@event("engine.ready", "engine.lost")
class EngineEvent(Message, frozen=True):
    """An engine is complete and can be used, or is gone."""

    engine_id: EngineId
    engine_instance: Text = ""
    """As in tickets."""
