"""Messages on the peer socket of an agent: from other agents, routers and tools.

Types and ranges are in the annotations; the agent checks the meaning. A request with an
``agent_boot`` is for that process of the agent: another one answers ``stale``.
"""

from typing import Annotated, Any, ClassVar

import msgspec

from kvbus.geometry import EngineSpec, RankSpec
from kvbus.protocol.cost import Cost
from kvbus.protocol.digests import Digest
from kvbus.protocol.engine import AgentRanks, AgentRole, Tables
from kvbus.protocol.mapped import MemorySocket, Sharing
from kvbus.protocol.message import (
    Address,
    Echo,
    Empty,
    Endpoint,
    Epoch,
    Id,
    Message,
    Request,
    Seconds,
    Secret,
    Size,
    Text,
    Tokens,
)
from kvbus.protocol.peer_view import PeerView
from kvbus.protocol.remote_ranks import AbortDelegate, CheckMemory, Delegate
from kvbus.protocol.rendezvous import Forgo, Meet
from kvbus.protocol.staging import Pack, Unpack
from kvbus.protocol.trace import Trace


class EngineMemory(msgspec.Struct, frozen=True):
    """The ranks of one engine that an agent has, and where each segment lies in its addresses.

    ``addresses[r][segment_id]`` belongs to ``ranks[r]``; empty on the side that only describes. A
    rank without addresses is unregistered: it can be read in boxes, with `Pack`, and no other way.
    """

    engine: EngineSpec
    ranks: Annotated[tuple[RankSpec, ...], msgspec.Meta(min_length=1, max_length=1024)]
    addresses: tuple[dict[str, Address], ...] = ()


class HandshakeDone(Message, frozen=True):
    """Reply to `Handshake`: the prefill engine's memory, and what NIXL needs to read it.

    ``memory_id`` stands for the processes of these ranks. ``others`` are the agents that have the
    rest, each to be shaken hands with. ``slot_bytes`` is the largest box of a `Pack`.
    ``nixl_metadata`` has one blob for each kind of memory, and none where the reader is to map the
    memory. ``access`` is shown in what is asked about these ranks later. ``memory_socket`` is for
    an agent of the same machine. ``digests`` says that `Digest` is answered.
    """

    protocol: int
    agent_id: Id
    memory: EngineMemory
    memory_id: Id
    nixl_agent: Id
    nixl_metadata: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=8)]
    events_endpoint: Endpoint
    max_lease_s: Seconds
    access: Secret
    slot_bytes: Size = 0
    others: tuple[AgentRanks, ...] = ()
    memory_socket: MemorySocket | None = None
    digests: bool = False


class Handshake(Request[HandshakeDone], frozen=True):
    """A decode agent introduces one of its engines to one prefill engine.

    It names the ``engine_instance`` and ``offer_id`` of a ticket of that engine, and shows its
    ``secret``; ahead of the first ticket neither of these two, where the prefill agent allows that.
    An agent that has only some ranks of the prefill engine, and no control session, is asked with
    ``ranks`` and ``access`` instead, as the engine's home named them.
    A reader that can map memory names its ``machine``. Where the answer has no ``nixl_metadata``,
    and the memory cannot be mapped, it asks again without.
    Refused with ``incompatible``, the field and both values, when KV of the one cannot be used by
    the other.
    """

    op: ClassVar[str] = "handshake"

    min_protocol: int
    max_protocol: int
    agent_id: Id
    engine_id: Id
    reader: EngineMemory
    engine_instance: Text = ""
    offer_id: Text = ""
    secret: Secret | None = None
    ranks: Annotated[tuple[Size, ...], msgspec.Meta(max_length=1024)] = ()
    access: Secret | None = None
    machine: Text = ""


class Granted(Message, frozen=True):
    """Reply to `Claim` and `Renew`: the lease and what of the offer is readable.

    The lease ends ``lease_s`` after the request was received. ``tables`` hold the blocks from the
    first one that the reader does not know yet. Everything that is asked under the lease shows its
    ``token``.
    """

    epoch: Epoch
    lease_s: Seconds
    num_tokens: Tokens
    sealed: bool
    tables: Tables
    token: Secret


class Claim(Request[Granted], frozen=True):
    """Asks for the lease of an offer, by its ticket's secret; ``busy`` while another has it.

    A lease of an earlier process of ``reader_agent``, with another ``reader_boot``, ends.
    """

    op: ClassVar[str] = "claim"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    offer_id: Id
    reader_id: Id
    lease_s: Seconds
    secret: Secret
    reader_agent: Text = ""
    reader_boot: Text = ""


class Renew(Request[Granted], frozen=True):
    """Lengthens a lease; ``known_blocks`` by group, so that the reply only holds what is new."""

    op: ClassVar[str] = "renew"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    offer_id: Id
    epoch: Epoch
    lease_s: Seconds
    token: Secret
    known_blocks: dict[str, Size] = msgspec.field(default_factory=dict)


class Confirm(Request[Empty], frozen=True):
    """Asks, after the last byte landed, whether the lease was live all along; ends it if so.

    Only an ``ok`` makes the bytes read under the lease valid.
    """

    op: ClassVar[str] = "confirm"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    offer_id: Id
    epoch: Epoch
    token: Secret


class Take(Request[Empty], frozen=True):
    """Claim and confirm in one: asks, after the last byte landed, whether ``tables`` were good.

    They are those of the ticket, and what was read. An ``ok`` says that they are the offer's, that
    it is sealed and was live all along; it ends the offer. ``token`` is the reader's own, new for
    each fetch: who shows it again is answered ``ok`` again. ``busy`` while another has the lease.
    """

    op: ClassVar[str] = "take"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    offer_id: Id
    reader_id: Id
    secret: Secret
    token: Secret
    tables: Tables
    reader_agent: Text = ""
    reader_boot: Text = ""


class Release(Request[Empty], frozen=True):
    """Gives a lease back unread, or the read of it abandoned; nothing of it is in flight.

    ``code`` is text: a newer reader may have codes that this agent does not know.
    """

    op: ClassVar[str] = "release"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    offer_id: Id
    epoch: Epoch
    token: Secret
    code: Id


class PeerWithdraw(Request[Empty], frozen=True):
    """A router ends an offer whose request was aborted, by its ticket's secret."""

    op: ClassVar[str] = "withdraw"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    offer_id: Id
    secret: Secret


class AgentStatus(Message, frozen=True):
    """Reply to `Status`: what the agent holds now; ``engines`` maps engine id to whether ready.

    ``data_endpoints`` are the HOST:PORT at which NIXL listens, empty where it uses no TCP.
    ``story`` has a line for each of the last events of what was asked for, the oldest first.
    ``sharing`` is about memory that agents of one machine map. ``successor`` is the boot id of the
    agent that has taken over, ``predecessor`` the peer endpoint of the one that this one has
    replaced, while it has not ended; empty when there is none.
    ``silent_peers`` are the endpoints of agents that do not answer, and in how many seconds each is
    tried again. ``engine_instances`` are the processes behind ``engines``; the two endpoints are
    where others reach the agent, as its tickets have it. ``echo`` is that of the question, and
    ``view`` is about the peer that it names.
    """

    agent_id: Id
    role: AgentRole
    engines: dict[str, bool]
    draining: bool
    counts: dict[str, int]
    data_endpoints: tuple[Text, ...] = ()
    story: tuple[Text, ...] = ()
    sharing: Sharing | None = None
    successor: Text = ""
    predecessor: Text = ""
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


PREFILL_PEER_REQUESTS: tuple[type[Request[Any]], ...] = (
    Handshake,
    Claim,
    Renew,
    Confirm,
    Take,
    Release,
    PeerWithdraw,
    Meet,
    Forgo,
    Pack,
    Unpack,
    Digest,
    CheckMemory,
    Status,
    Trace,
)
DECODE_PEER_REQUESTS: tuple[type[Request[Any]], ...] = (
    Delegate,
    AbortDelegate,
    Cost,
    Status,
    Trace,
)
