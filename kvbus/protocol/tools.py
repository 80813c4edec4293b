"""Messages for routers and tools. Events may be lost: they are hints to request the state."""

import re
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvbus.protocol.engine import AgentRole, CellName
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
from kvbus.protocol.ticket import PackedTables

MAX_SPANS = 512
MAX_OTHERS = 64
AnySeconds = Annotated[float, msgspec.Meta(ge=0)]
Echo = Annotated[str, msgspec.Meta(max_length=2 * MAX_TEXT_CHARS)]
"""Returned unchanged, for a large reply."""


class PeerView(msgspec.Struct, frozen=True):
    """An agent's view of another one, and its own key."""

    server_key: ServerKey = ""
    roles: tuple[Text, ...] = ()
    """With which the agent trusts ``key``."""
    listed: bool = False
    """In the configuration of a decode agent."""
    connected: bool = False
    """Ready for the first fetch."""
    num_routes: Size = 0
    """Created by handshakes."""
    problem: Text = ""
    """Why it is not connected, or the last handshake failed."""


class Sharing(msgspec.Struct, frozen=True):
    """Memory that an agent lends or maps; see [Memory socket](#memory-socket)."""

    machine: Text = ""
    uid: Size = 0
    mount_namespace: Text = ""
    pid_namespace: Text = ""
    """UCX reads the memory of another one over TCP."""
    path: Text = ""
    closed: Text = ""
    """Why it shares no memory."""
    engines: dict[str, Text] = {}
    """For each engine that a decode agent knows: ``open``, or why its memory is not mapped."""


class Fault(msgspec.Struct, frozen=True):
    """One problem of an agent."""

    what: Text
    do: Text
    """The remedy."""


class ProcessStatus(msgspec.Struct, frozen=True):
    """One process of an agent."""

    name: Text
    """``control``, or ``data``, which moves KV."""
    pid: Size = 0
    """0 while it does not run."""
    cpu_s: AnySeconds = 0.0
    memory_bytes: Size = 0
    """Without KV and other shared memory."""
    num_restarts: Size = 0
    last_end: Text = ""
    """Reason why its predecessor ended."""
    gpu_bytes: dict[Text, Size] = msgspec.field(default_factory=dict)
    """By UUID: its CUDA context and staging slots. GPUs of unknown use are absent."""


class PoolStatus(msgspec.Struct, frozen=True):
    """Memory for parked offers of one engine."""

    engine_id: Text
    engine_instance: Text = ""
    size_bytes: Size = 0
    used_bytes: Size = 0
    num_offers: Size = 0
    is_attached: bool = True
    """False after the end of the engine."""


class AgentStatus(Message, frozen=True):
    agent_id: AgentId
    role: AgentRole
    engines: dict[str, bool]
    """Whether each is ready."""
    draining: bool
    """It accepts no new offers or fetches."""
    counts: dict[str, int]
    """Offers, leases, fetches and other objects."""
    data_endpoints: tuple[Text, ...] = ()
    """HOST:PORT of the TCP sockets of its NIXL. *Private*: only for senders with a key, or of the
    same user (or root) on this machine."""
    history: tuple[Text, ...] = ()
    """Last events, for people."""
    sharing: Sharing | None = None
    """Private."""
    silent_peers: dict[str, float] = msgspec.field(default_factory=dict)
    """By endpoint: seconds without an answer to pings."""
    engine_instances: dict[str, str] = msgspec.field(default_factory=dict)
    """As in tickets."""
    peer_endpoint: Text = ""
    """As in tickets."""
    events_endpoint: Text = ""
    echo: Echo = ""
    view: PeerView | None = None
    faults: tuple[Fault, ...] = ()
    """Private."""
    processes: tuple[ProcessStatus, ...] = ()
    """Private."""
    pools: dict[str, PoolStatus] = msgspec.field(default_factory=dict)
    """By the ``engine_id`` that their readers use."""


@request("status", Socket.PREFILL_PEER, Socket.DECODE_PEER, allowed_roles=Role)
class Status(Request[AgentStatus], frozen=True):
    """Get the state of an agent."""

    fetch_id: Text = ""
    """To get its ``history``."""
    offer_id: Text = ""
    """To get its ``history``."""
    echo: Echo = ""
    peer: Text = ""
    """Endpoint of another agent, for its ``view``; ``key`` alone is enough."""
    key: Text = ""
    """CURVE key of that agent, in Z85."""
    faults: bool = False


class Predicted(Message, frozen=True):
    predicted_s: AnySeconds
    """From the request of the fetch to its end."""
    num_bytes: Size
    decode_engine: EngineId
    path: Text = ""
    """Empty if the engines have not connected: the prediction is a guess."""
    num_observed: Size = 0
    """Handoffs that have corrected the prediction."""


@request(
    "cost",
    Socket.DECODE_PEER,
    allowed_roles=(Role.DECODE, Role.ROUTER, Role.OBSERVER),
    refusals="engine_unknown engine_not_ready",
)
class Cost(Request[Predicted], frozen=True):
    """Predict the duration of a fetch at a decode agent now, for routers. It changes nothing."""

    endpoint: Endpoint
    """The prefill agent, as in its tickets."""
    num_tokens: Tokens
    """Including those in the decode engine's cache."""
    first_token: Tokens = 0
    """Number of tokens in that cache."""
    prefill_engine: Text = ""
    """May be empty if the agents know only one."""
    decode_engine: Text = ""
    """May be empty if the agent has only one."""


class Span(Redacted, frozen=True):
    """A time interval by the agent's own clock."""

    name: Id
    """``offer`` or ``fetch``, a state of one, or a step of a read."""
    start_s: float
    end_s: float | None = None
    """Nil while in progress."""
    depth: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    """0 for an offer or a fetch. A span is part of the nearest earlier span with a smaller depth.
    """
    about: Text = ""
    """Distinguishes several."""
    error: Text = ""
    attributes: dict[str, Scalar] = msgspec.field(default_factory=dict)


class OtherAgent(Redacted, frozen=True):
    """Another agent with a part in it."""

    endpoint: Endpoint
    server_key: ServerKey = ""


class Traced(Message, frozen=True):
    agent_id: AgentId
    role: AgentRole
    boot: Id
    now_s: float
    """The agent's clock, from an arbitrary start."""
    wall_s: float
    """The machine's clock, since 1970."""
    spans: Annotated[tuple[Span, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()
    """Oldest first."""
    cut: bool = False
    """Older entries did not fit."""
    agents: Annotated[tuple[OtherAgent, ...], msgspec.Meta(max_length=MAX_OTHERS)] = ()


@request("trace", Socket.PREFILL_PEER, Socket.DECODE_PEER, allowed_roles=Role)
class Trace(Request[Traced], frozen=True):
    """Get the spans of a request, an offer or a fetch; see [Traces](#traces)."""

    request_id: Text = ""
    """As in the ticket or rendezvous."""
    offer_id: Text = ""
    """An offer of this agent, or with tiles gathered here."""
    fetch_id: Text = ""
    """A fetch of this agent, or with a part read here."""


class TraceResult(Redacted, frozen=True):
    """The spans of each offer or fetch, oldest first."""

    entries: tuple[tuple[Span, ...], ...] = ()
    agents: tuple[OtherAgent, ...] = ()

    def newest(self) -> tuple[tuple[Span, ...], bool]:
        """Return the newest spans that fit into a reply, and whether some were left out."""
        kept: list[tuple[Span, ...]] = []
        num_left = MAX_SPANS
        for entry in reversed(self.entries):
            kept.insert(0, entry[:num_left])
            num_left -= len(kept[0])
        spans = tuple(span for entry in kept for span in entry)
        return spans, len(spans) < sum(map(len, self.entries))


class Live(msgspec.Struct, frozen=True):
    """A snapshot of an agent, at ``now_s`` of the clock of its spans.

    ``metrics`` are keyed as on its Prometheus page. ``recent`` has the spans of its newest offers
    or fetches. ``key_options`` are the options of commands to this agent.
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
    """A parsed W3C ``traceparent``."""

    trace_id: str
    span_id: str
    sampled: bool

    @classmethod
    def read(cls, text: str) -> "TraceParent | None":
        found = _FORM.fullmatch(text)
        if found is None:
            return None
        trace_id, span_id, flags = found.groups()
        if not (int(trace_id, 16) and int(span_id, 16)):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def known_trace(*texts: str) -> str:
    """Return the first valid ``traceparent``, or ""."""
    return next((text for text in texts if text and TraceParent.read(text)), "")


def trace_attributes(*texts: str) -> dict[str, str]:
    text = known_trace(*texts)
    return {"traceparent": text} if text else {}


@event("heartbeat")
class Heartbeat(Message, frozen=True):
    """The agent is alive; every 2 s (``heartbeat_s``)."""

    seqs: dict[str, Size]
    """Last ``seq`` of each topic."""


@event("offer.opened", "offer.extended", "offer.sealed", "offer.released")
class OfferEvent(Message, frozen=True):
    """An offer was opened, extended, sealed or released."""

    offer_id: OfferId
    num_tokens: Tokens
    """Tokens that are ready."""
    outcome: Text = ""
    """Empty while the offer lives."""


@event("offer.parked")
class OfferParked(Message, frozen=True):
    """An offer was parked. The other fields name its pool, as in a ticket."""

    offer_id: OfferId
    engine_id: EngineId
    engine_instance: Text
    blocks: PackedTables = ""
    cell: CellName = 0


@event("lease.granted", "lease.revoked", "lease.expired", "lease.ended")
class LeaseEvent(Message, frozen=True):
    """A lease was granted, revoked by a withdrawal or a new acquire, has expired, or was ended by
    its reader.
    """

    offer_id: OfferId
    epoch: Epoch


@event("fetch.completed", "fetch.failed", "fetch.cancelled")
class FetchEvent(Message, frozen=True):
    """A fetch has ended."""

    fetch_id: FetchId
    request_id: Text
    code: Text = ""
    """Empty if it completed."""


@event("engine.ready", "engine.lost")
class EngineEvent(Message, frozen=True):
    """An engine is ready, or was lost. Pools are engines here, too."""

    engine_id: EngineId
    engine_instance: Text = ""
