"""Messages that routers and tools ask any agent with: its status, what a handoff would cost."""

from typing import Annotated

import msgspec

from kvbus.protocol.engine import AgentRole
from kvbus.protocol.message import (
    MAX_TEXT_CHARS,
    AgentId,
    Endpoint,
    EngineId,
    Message,
    Request,
    Role,
    ServerKey,
    Size,
    Socket,
    Text,
    Tokens,
    request,
)
from kvbus.protocol.trace import Span

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
    """Agents that do not answer, by endpoint: for how many seconds nothing came."""
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
