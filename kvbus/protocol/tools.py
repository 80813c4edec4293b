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
"""Returned unchanged, to make the reply large."""


class PeerView(msgspec.Struct, frozen=True):
    """An agent's view of another agent, and its own key."""

    server_key: ServerKey = ""
    roles: tuple[Text, ...] = ()
    """Roles that the agent trusts ``key`` with."""
    listed: bool = False
    """Whether ``peer`` is in the configuration of a decode agent."""
    connected: bool = False
    """Whether that peer is ready for the first fetch."""
    num_routes: Size = 0
    """Number of routes from engines of ``peer``, created by handshakes."""
    problem: Text = ""
    """Reason why it is not connected, or why the last handshake failed; for people."""


class Sharing(msgspec.Struct, frozen=True):
    """Memory that an agent lends or maps; see [Memory socket](#memory-socket)."""

    machine: Text = ""
    """Boot id of the agent's kernel."""
    uid: Size = 0
    """UID of the agent's process."""
    mount_namespace: Text = ""
    """Its mount namespace, if the kernel names it."""
    pid_namespace: Text = ""
    """Its PID namespace: UCX reads the memory of another one over TCP."""
    path: Text = ""
    """Path of a prefill agent's memory socket; empty if it has none."""
    closed: Text = ""
    """Reason why it neither lends nor maps memory, for people; empty if it may."""
    engines: dict[str, Text] = {}
    """For each engine that a decode agent has connected to, ``open``, or the reason why its memory
    is not mapped."""


class Fault(msgspec.Struct, frozen=True):
    """One problem of an agent."""

    what: Text
    """The problem, for people."""
    do: Text
    """The remedy."""


class ProcessStatus(msgspec.Struct, frozen=True):
    """One process of an agent."""

    name: Text
    """``control``, or ``data`` for the process that moves KV."""
    pid: Size = 0
    """Process id; 0 while it does not run."""
    cpu_s: AnySeconds = 0.0
    """CPU time since its start."""
    memory_bytes: Size = 0
    """Memory, without KV and other shared memory."""
    num_restarts: Size = 0
    """Number of restarts."""
    last_end: Text = ""
    """Reason why its predecessor ended, for people."""
    gpu_bytes: dict[Text, Size] = msgspec.field(default_factory=dict)
    """Memory that it has taken of each GPU, by UUID: its CUDA context, and staging slots if they
    are there. GPUs of unknown use are absent."""


class PoolStatus(msgspec.Struct, frozen=True):
    """Memory of a prefill agent for parked offers of one engine."""

    engine_id: Text
    """Id of the engine."""
    engine_instance: Text = ""
    """Instance of the pool, for a handshake."""
    size_bytes: Size = 0
    """Size of the pool."""
    used_bytes: Size = 0
    """Bytes of the blocks in use."""
    num_offers: Size = 0
    """Number of parked offers."""
    is_attached: bool = True
    """Whether the engine is here: parked offers outlive it."""


class AgentStatus(Message, frozen=True):
    agent_id: AgentId
    role: AgentRole
    engines: dict[str, bool]
    """Engine ids, and whether each is ready."""
    draining: bool
    """Whether the agent refuses new offers or fetches."""
    counts: dict[str, int]
    """Numbers of offers, leases, fetches and other objects that it holds."""
    data_endpoints: tuple[Text, ...] = ()
    """HOST:PORT of each TCP socket at which the agent's NIXL listens. Only for senders with a key,
    or of the same user (or root) on this machine."""
    history: tuple[Text, ...] = ()
    """Last events of the requested fetch or offer, for people."""
    sharing: Sharing | None = None
    """State of memory sharing with agents of the same machine. Only for the senders that get
    ``data_endpoints``."""
    silent_peers: dict[str, float] = msgspec.field(default_factory=dict)
    """Agents that do not answer pings, by endpoint: seconds of silence."""
    engine_instances: dict[str, str] = msgspec.field(default_factory=dict)
    """The ``engine_instance`` of each engine in tickets."""
    peer_endpoint: Text = ""
    """Address of this socket for others: the ``endpoint`` in tickets."""
    events_endpoint: Text = ""
    """Address of its events socket."""
    echo: Echo = ""
    view: PeerView | None = None
    """View of the requested ``peer``."""
    faults: tuple[Fault, ...] = ()
    """Current problems, if requested. Only for the senders that get ``data_endpoints``."""
    processes: tuple[ProcessStatus, ...] = ()
    """Processes of the agent. Only for the senders that get ``data_endpoints``."""
    pools: dict[str, PoolStatus] = msgspec.field(default_factory=dict)
    """Pools of parked offers, by the ``engine_id`` that their readers use."""


@request("status", Socket.PREFILL_PEER, Socket.DECODE_PEER, allowed_roles=Role)
class Status(Request[AgentStatus], frozen=True):
    """Get the state of an agent; subscribers resynchronize with it."""

    fetch_id: Text = ""
    """Fetch of this decode agent, to get its ``history``."""
    offer_id: Text = ""
    """Offer of this prefill agent, to get its ``history``."""
    echo: Echo = ""
    peer: Text = ""
    """Endpoint of another agent, to get the ``view`` of it. ``key`` alone is enough."""
    key: Text = ""
    """CURVE key of that agent, in Z85."""
    faults: bool = False
    """Whether to return ``faults``."""


class Predicted(Message, frozen=True):
    predicted_s: AnySeconds
    """Seconds from the request of the fetch to its end."""
    num_bytes: Size
    """Bytes that it would move."""
    decode_engine: EngineId
    path: Text = ""
    """Path of the read. Empty if the engines have not connected; then the prediction is a guess."""
    num_observed: Size = 0
    """Number of handoffs from that agent on this path that have corrected the prediction."""


@request(
    "cost",
    Socket.DECODE_PEER,
    allowed_roles=(Role.DECODE, Role.ROUTER, Role.OBSERVER),
    refusals="engine_unknown engine_not_ready",
)
class Cost(Request[Predicted], frozen=True):
    """Predict the duration of a fetch at a decode agent now, for routers. It changes nothing."""

    endpoint: Endpoint
    """Endpoint of the prefill agent, as in its tickets."""
    num_tokens: Tokens
    """Tokens of the request, including those in the decode engine's cache."""
    first_token: Tokens = 0
    """Number of tokens that the decode engine has already."""
    prefill_engine: Text = ""
    """Id of the prefill engine. May be empty if the two agents know only one."""
    decode_engine: Text = ""
    """Id of the decode engine. May be empty if this agent has only one."""


class Span(Redacted, frozen=True):
    """A time interval by the agent's own clock."""

    name: Id
    """Kind of the span: ``offer`` or ``fetch``, a state of one, or a step of a read."""
    start_s: float
    """Start, by the agent's clock."""
    end_s: float | None = None
    """End, by the agent's clock; nil while in progress."""
    depth: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    """0 for an offer or a fetch. A span is part of the nearest earlier span with a smaller depth.
    """
    about: Text = ""
    """Distinguishes several, such as the transfers of a read; empty if there is only one."""
    error: Text = ""
    """Error that ended it; empty for none."""
    attributes: dict[str, Scalar] = msgspec.field(default_factory=dict)
    """Further plain values."""


class OtherAgent(Redacted, frozen=True):
    """Another agent with a part in the traced request."""

    endpoint: Endpoint
    server_key: ServerKey = ""


class Traced(Message, frozen=True):
    agent_id: AgentId
    role: AgentRole
    boot: Id
    """Boot id of the agent."""
    now_s: float
    """The agent's clock at the reply, in seconds since an arbitrary time."""
    wall_s: float
    """The machine's clock at the reply, in seconds since 1970."""
    spans: Annotated[tuple[Span, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()
    """Spans that the agent has kept, oldest first."""
    cut: bool = False
    """Whether the agent has kept more than fits: the oldest entries are left out."""
    agents: Annotated[tuple[OtherAgent, ...], msgspec.Meta(max_length=MAX_OTHERS)] = ()
    """Agents with a part in it."""


@request("trace", Socket.PREFILL_PEER, Socket.DECODE_PEER, allowed_roles=Role)
class Trace(Request[Traced], frozen=True):
    """Get the spans of a request, an offer or a fetch, and the agent's clock; see
    [Traces](#traces).
    """

    request_id: Text = ""
    """A request, by its id in the ticket or rendezvous."""
    offer_id: Text = ""
    """An offer of this agent, or of another agent that had tiles gathered here."""
    fetch_id: Text = ""
    """A fetch of this agent, or of another agent that had a part read here."""


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
    """The agent is alive. Published every 2 s (``heartbeat_s``)."""

    seqs: dict[str, Size]
    """Last ``seq`` of each topic."""


@event("offer.opened", "offer.extended", "offer.sealed", "offer.released")
class OfferEvent(Message, frozen=True):
    """An offer was opened, extended, sealed or released."""

    offer_id: OfferId
    num_tokens: Tokens
    """Number of tokens that are ready."""
    outcome: Text = ""
    """As in ``released``; empty while the offer lives."""


@event("offer.parked")
class OfferParked(Message, frozen=True):
    """An offer was parked: its blocks are in a pool of the agent now."""

    offer_id: OfferId
    engine_id: EngineId
    """Id of the pool, for ``handshake`` and ``acquire``."""
    engine_instance: Text
    """Instance of the pool."""
    blocks: PackedTables = ""
    """Blocks of the pool, as in a ticket."""
    cell: CellName = 0
    """Cell of the pool's page, as in a ticket."""


@event("lease.granted", "lease.revoked", "lease.expired", "lease.ended")
class LeaseEvent(Message, frozen=True):
    """A lease was granted, was revoked by a withdrawal or a new acquire, has expired, or was ended
    by its reader.
    """

    offer_id: OfferId
    epoch: Epoch


@event("fetch.completed", "fetch.failed", "fetch.cancelled")
class FetchEvent(Message, frozen=True):
    """A fetch has ended."""

    fetch_id: FetchId
    request_id: Text
    """Request id from the ticket."""
    code: Text = ""
    """As in the reply to ``fetch``; empty if it completed."""


@event("engine.ready", "engine.lost")
class EngineEvent(Message, frozen=True):
    """An engine is ready for use, or was lost. Pools of parked offers are engines here, too."""

    engine_id: EngineId
    engine_instance: Text = ""
    """As in tickets."""
