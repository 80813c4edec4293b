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
"""Comes back as it is: the answer is no smaller than the question, and than most packets."""


class PeerView(msgspec.Struct, frozen=True):
    """What an agent says of another one that it is asked about in ``status``, and what it speaks
    itself. From ``listed`` on it is what a decode agent knows that has met it.
    """

    min_protocol: Size = 0
    """Lowest protocol version that the agent speaks."""
    max_protocol: Size = 0
    """Highest protocol version that the agent speaks."""
    server_key: ServerKey = ""
    roles: tuple[Text, ...] = ()
    """What the agent trusts ``key`` as; empty when it does not, or has no keys."""
    listed: bool = False
    """Whether a decode agent is told of ``peer`` in its configuration."""
    warm: bool = False
    """Whether that is met, and its first fetch costs what the next one does."""
    num_routes: Size = 0
    """Routes from engines of ``peer``, which handshakes have made."""
    problem: Text = ""
    """Why the last handshake with ``peer`` came to nothing, or why it is not warm; empty otherwise.
    The text is for people and may change."""


class Sharing(msgspec.Struct, frozen=True):
    """What an agent says of memory that it lends or maps; see [Memory socket](#memory-socket)."""

    machine: Text = ""
    """Boot id of the agent's kernel."""
    uid: Size = 0
    """User of the agent's process."""
    mount_namespace: Text = ""
    """Its mount namespace, as the kernel names it; empty where it does not."""
    pid_namespace: Text = ""
    """Its PID namespace, likewise: UCX reads the memory of another one over TCP."""
    path: Text = ""
    """Path of a prefill agent's memory socket; empty when it has none."""
    closed: Text = ""
    """Why it neither lends nor maps anything, for people; empty when it may."""
    engines: dict[str, Text] = {}
    """Of each engine that a decode agent has met, ``open`` when its memory is mapped, or why it is
    not, for people."""


class AgentStatus(Message, frozen=True):
    agent_id: AgentId
    role: AgentRole
    engines: dict[str, bool]
    """Engine ids, and whether each is ready."""
    draining: bool
    """Whether it takes no new offers or fetches."""
    counts: dict[str, int]
    """How many of what it holds, such as offers, leases and fetches. Names may be added."""
    data_endpoints: tuple[Text, ...] = ()
    """HOST:PORT of each TCP socket at which the agent's NIXL listens; empty where it uses no TCP,
    or was not needed so far. Empty, too, for a sender that neither shows a key nor is a process of
    the same user (or root) on this machine."""
    story: tuple[Text, ...] = ()
    """What happened to the fetch or offer that was asked for: a line for each of its last events,
    the oldest first. Empty when it is not known. The text is for people and may change."""
    sharing: Sharing | None = None
    """Whether memory is shared with agents of the same machine; nil from an agent that never does.
    Also nil for a sender that neither shows a key nor is of the same user."""
    silent_peers: dict[str, float] = msgspec.field(default_factory=dict)
    """Endpoints of agents that do not answer, and for how many seconds nothing came from each."""
    engine_instances: dict[str, str] = msgspec.field(default_factory=dict)
    """Of each engine, its ``engine_instance`` in tickets."""
    peer_endpoint: Text = ""
    """Where others reach this socket: the ``endpoint`` in tickets."""
    events_endpoint: Text = ""
    """Where its events are."""
    echo: Echo = ""
    view: PeerView | None = None
    """What the agent knows of the ``peer`` that it was asked about; nil when it was asked about
    none."""


@request("status", Socket.PREFILL_PEER, Socket.DECODE_PEER, askers=Role)
class Status(Request[AgentStatus], frozen=True):
    """Asks what an agent holds now. This is what a subscriber resyncs with."""

    fetch_id: Text = ""
    """A fetch of this decode agent whose story is wanted; empty for none."""
    offer_id: Text = ""
    """An offer of this prefill agent whose story is wanted; empty for none."""
    echo: Echo = ""
    peer: Text = ""
    """Endpoint, as tickets have it, of another agent; its ``view`` is wanted if this or ``key`` is
    not empty."""
    key: Text = ""
    """CURVE key of that agent, in Z85."""


class Predicted(Message, frozen=True):
    predicted_s: AnySeconds
    """Seconds from the request of the fetch to its end."""
    num_bytes: Size
    """Bytes that it would move."""
    decode_engine: EngineId
    path: Text = ""
    """How it would be read. Empty where the engines have not met: what is told is a guess then,
    with 0.1 s for that."""
    num_observed: Size = 0
    """By how many handoffs from that prefill agent, on this path, the prediction was corrected."""


@request(
    "cost",
    Socket.DECODE_PEER,
    askers=(Role.DECODE, Role.ROUTER, Role.OBSERVER),
    refusals="engine_unknown engine_not_ready",
)
class Cost(Request[Predicted], frozen=True):
    """Asks a decode agent what a fetch would take now, for routers that choose between engines. It
    changes nothing.
    """

    endpoint: Endpoint
    """The prefill agent's, as in its tickets."""
    num_tokens: Tokens
    """Tokens of the request, those in the decode engine's cache included."""
    first_token: Tokens = 0
    """How many of them the decode engine has already."""
    prefill_engine: Text = ""
    """Which engine of the prefill agent; may be empty where it has one that the two agents know."""
    decode_engine: Text = ""
    """Which engine of this agent; may be empty where it has one."""


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
