"""Messages that routers and tools ask any agent with: its status, what a handoff would cost."""

from typing import Annotated, ClassVar

import msgspec

from kvbus.protocol.engine import AgentRole
from kvbus.protocol.message import (
    Echo,
    Endpoint,
    Id,
    Message,
    Request,
    Size,
    Text,
    Tokens,
)
from kvbus.protocol.trace import Span

AnySeconds = Annotated[float, msgspec.Meta(ge=0)]


class PeerView(msgspec.Struct, frozen=True):
    """What an agent speaks and is known by, and what it knows of the agent that was asked about.

    ``server_key`` is its own CURVE key, ``roles`` what it trusts the other's key as. The rest is
    that of a decode agent: whether its configuration lists the other, and all of that is ready
    for the first fetch; the routes that it knows; why the last handshake came to nothing.
    """

    min_protocol: Size = 0
    max_protocol: Size = 0
    server_key: Text = ""
    roles: tuple[Text, ...] = ()
    listed: bool = False
    warm: bool = False
    num_routes: Size = 0
    problem: Text = ""


class Sharing(msgspec.Struct, frozen=True):
    """Whether an agent shares memory with others of its machine, and what decides that.

    A prefill agent lends at ``path``. ``engines`` are those that a decode agent has met, and for
    each ``open``, or why its memory is not mapped. ``closed`` says why there is none at all.
    """

    machine: Text = ""
    uid: Size = 0
    mount_namespace: Text = ""
    pid_namespace: Text = ""
    path: Text = ""
    closed: Text = ""
    engines: dict[str, Text] = {}


class AgentStatus(Message, frozen=True):
    """Reply to `Status`: what the agent holds now; ``engines`` maps engine id to whether ready.

    ``data_endpoints`` are the HOST:PORT at which NIXL listens, empty where it uses no TCP.
    ``story`` has a line for each of the last events of what was asked for, the oldest first.
    ``sharing`` is about memory that agents of one machine map.
    ``silent_peers`` are the endpoints of agents that do not answer, and for how many seconds
    nothing has come from each. ``engine_instances`` are the processes behind ``engines``; the two
    endpoints are where others reach the agent, as its tickets have it. ``echo`` is that of the
    question, and ``view`` is about the peer that it names.
    """

    agent_id: Id
    role: AgentRole
    engines: dict[str, bool]
    draining: bool
    counts: dict[str, int]
    data_endpoints: tuple[Text, ...] = ()
    story: tuple[Text, ...] = ()
    sharing: Sharing | None = None
    silent_peers: dict[str, float] = msgspec.field(default_factory=dict)
    engine_instances: dict[str, str] = msgspec.field(default_factory=dict)
    peer_endpoint: Text = ""
    events_endpoint: Text = ""
    echo: Echo = ""
    view: PeerView | None = None


class Status(Request[AgentStatus], frozen=True):
    """Asks what an agent holds; with a fetch or offer id also for its story.

    With a ``peer``, its endpoint in tickets, and its CURVE ``key`` also for what the agent knows of
    that agent. ``echo`` comes back as it is, so that the answer is as large as the question.
    """

    op: ClassVar[str] = "status"

    fetch_id: Text = ""
    offer_id: Text = ""
    echo: Echo = ""
    peer: Text = ""
    key: Text = ""


class Predicted(Message, frozen=True):
    """Reply to `Cost`: ``predicted_s`` from the request of a fetch to its end.

    ``queue_s`` of that is due to fetches that are under way, and to reads by other agents from that
    prefill agent, which its heartbeats tell: each is taken to be as large. ``path`` is empty, and
    the rest a guess, for engines that have not met. ``num_observed`` handoffs from that agent by
    that path correct the prediction, the last of which ended ``observed_s_ago``.
    """

    predicted_s: AnySeconds
    queue_s: AnySeconds
    num_bytes: Size
    decode_engine: Id
    path: Text = ""
    num_observed: Size = 0
    observed_s_ago: AnySeconds | None = None


class Cost(Request[Predicted], frozen=True):
    """Asks a decode agent what a fetch would take now; it changes nothing.

    ``endpoint`` is the prefill agent's, as in its tickets. Engines need a name where the agents
    have several. The first ``first_token`` tokens are in the decode engine's cache already.
    """

    op: ClassVar[str] = "cost"

    endpoint: Endpoint
    num_tokens: Tokens
    first_token: Tokens = 0
    prefill_engine: Text = ""
    decode_engine: Text = ""


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
