"""Processes of other agents: their resources here, and the meaning of failures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import anyio
import structlog

from kvbus.bus import OnReply, RequestClient
from kvbus.data.client import Defined
from kvbus.errors import ErrorCode, KVBusError, LocalError, PeerLost, RemoteError
from kvbus.planning import Learned, PlacedRank
from kvbus.protocol.engine import Fetched
from kvbus.protocol.message import R, Request, Role
from kvbus.protocol.peer import AwaitWork, CancelRequest, CheckMemory
from kvbus.protocol.ticket import Ticket
from kvbus.protocol.tools import Fault
from kvbus_decode.mapped import MappedMemory, MemoryKey
from kvbus_decode.nixl_peers import NixlMemory, NixlPeer, NixlPeers

log = structlog.get_logger()

REFUSED_S = 30.0
"""Fetches from an agent that is silent for longer are refused."""
RETRY_S = 1.0
CANCEL_TIMEOUT_S = 5.0

OTHER_MEMORY = (
    ErrorCode.STALE,
    ErrorCode.TRANSFER_FAILED,
    ErrorCode.PEER_LOST,
    ErrorCode.ENGINE_LOST,
    ErrorCode.ENGINE_UNKNOWN,
)
"""Failures after which the memory of an engine may have moved."""

FailureOf = Literal["read", "copy", "memory", "lease"]


class PeerAddress(NamedTuple):
    endpoint: str
    server_key: str = ""
    role: Role = Role.PREFILL

    @classmethod
    def of(cls, ticket: Ticket) -> "PeerAddress":
        return cls(ticket.endpoint, ticket.server_key)


@dataclass(slots=True, eq=False)
class Peer:
    """Connection to an address, and the current or next process there."""

    address: PeerAddress
    client: RequestClient
    nixl: NixlPeers
    on_lost: Callable[["RemoteAgent"], object]
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    events_endpoint: str = ""
    refusal: str = ""
    num_users: int = 0
    used_at: float = 0.0
    is_refused: bool = False
    remote: "RemoteAgent" = field(init=False)

    def __post_init__(self) -> None:
        self.remote = RemoteAgent(self)

    @property
    def endpoint(self) -> str:
        return self.address.endpoint

    def request(self, message: Request[R], timeout_s: float, on_reply: OnReply[R]) -> int | None:
        """Send a request; ``on_reply`` also gets a failure to send."""
        try:
            return self.client.send(message, timeout_s=timeout_s, on_reply=on_reply)
        except KVBusError as error:
            on_reply(error)
            return None

    def cancel(self, request_id: int) -> None:
        self.client.take_back(request_id)
        self.request(CancelRequest(request_id), CANCEL_TIMEOUT_S, lambda _: None)

    def check_answers(self, boot: str | None) -> None:
        """Raise `RemoteError` (``peer_unreachable``) for an agent that is silent for `REFUSED_S`.

        An unknown ``boot`` in a ticket belongs to a newer process.
        """
        client = self.client
        if boot not in (None, client.peer_boot):
            client.resolve_again()
            return
        if client.silent_s <= REFUSED_S:
            if self.is_refused:
                log.info("peer.alive", peer=self.endpoint)
            self.is_refused = False
            return
        if not self.is_refused:
            log.warning("peer.silent", peer=self.endpoint, peer_boot=self.remote.boot)
        self.is_refused = True
        raise RemoteError(
            f"the prefill agent at {self.endpoint} has not answered for {client.silent_s:.0f} s; "
            "requests are retried",
            code=ErrorCode.PEER_UNREACHABLE,
            endpoint=self.endpoint,
            retry_after_s=RETRY_S,
        )


# Events, and what each closes:
#
#     another boot id replies, no process listens at    the RemoteAgent. The next process to reply,
#     the port, the key is not trusted, the peer is     even the same one, gets a new RemoteAgent
#     dropped
#
#     a request fails: peer_lost                        the RemoteAgent
#
#     a READ fails: peer_lost (UCX closed the           its NIXL peer, which is added again before
#     connection)                                       the next READ; and the routes, as below
#
#     a job or request fails: `OTHER_MEMORY`, or        the routes from this engine: the next fetch
#     forbidden for a request with ``rank_secret``           shakes hands
#
#     an event reports the end of an engine, or a       the routes from this engine
#     handshake finds another instance of it
#
#     a handshake names another NIXL agent: the data    the earlier NIXL peer, and the routes that
#     process was replaced                              read from it
#
#     mapped memory closes                              the routes that copy from it
#
#     busy, timeout, draining, other refusals, errors   nothing
#     of this process
#
#     pings get no reply                                nothing: the agent may be paused. After
#                                                       `REFUSED_S` new fetches are refused
#
#     a pause of this process                           nothing: no ping was sent
class RemoteAgent:
    """One process of another agent, and its resources here, unused after `close`.

    ``boot`` is empty until the first reply.
    """

    def __init__(self, peer: Peer, earlier: str = "") -> None:
        self.peer, self.earlier, self.boot = peer, earlier, ""
        self.closed = ""
        """Reason; empty while open."""
        self.nixl_turn = anyio.Lock()
        self.mapped = WeakValueDictionary[MemoryKey, MappedMemory]()
        self.learned: dict[str, Learned] = {}
        self.sources: dict[Source, Callable[[], None]] = {}
        """Values close the route."""

    def close(self, reason: str) -> None:
        if self.closed:
            return
        self.closed = reason
        self.remove(lambda _: True)
        for memory in list(self.mapped.values()):
            memory.close(f"the prefill agent {reason}")
            memory.shut_down()
        self.peer.nixl.release(self.nixl_memory)
        self.peer.on_lost(self)

    def loss(self) -> PeerLost:
        return PeerLost(
            f"the agent at {self.peer.endpoint} {self.closed}", endpoint=self.peer.endpoint
        )

    def note_failure(self, error: KVBusError, source: "Source", of: FailureOf) -> None:
        """Close the resources that a failure proves lost (table above)."""
        if self.closed or isinstance(error, LocalError):
            return
        if of in ("memory", "lease") and isinstance(error, PeerLost):
            self.close("restarted")
            return
        if of == "read" and error.code == ErrorCode.PEER_LOST and source.nixl_peer is not None:
            source.nixl_peer.break_off()
        is_denied = of == "memory" and error.code == ErrorCode.FORBIDDEN
        if error.code in OTHER_MEMORY or is_denied:
            self.remove_engine(source.engine_id, source.engine_instance)

    def remove_engine(self, engine_id: object, instance: object) -> None:
        here = ("", instance)
        self.remove(lambda one: one.engine_id == engine_id and one.engine_instance in here)

    def end_memory(self, memory: MappedMemory) -> None:
        """Close the routes that copy from mapped memory: it now reads as zeros."""
        for key in [key for key, known in self.mapped.items() if known is memory]:
            del self.mapped[key]
        self.remove(lambda one: one.mapped is memory)

    def remove(self, is_removed: Callable[["Source"], bool]) -> None:
        for source, close in list(self.sources.items()):
            if is_removed(source):
                close()

    # An agent can replace its data process without a restart. The new NIXL agent has another name
    # and other registrations. A READ from the earlier one must not be served by the new one, which
    # may have other memory at the same address.
    async def connect_nixl(self, memory: NixlMemory) -> NixlPeer:
        self.remove(lambda one: one.nixl_agent not in ("", memory.agent))
        nixl = self.peer.nixl
        nixl.release(self.nixl_memory, but=memory.agent)
        async with self.nixl_turn:
            try:
                if not self.closed:
                    found = await nixl.add(memory, self.peer.address, self.nixl_memory)
            finally:
                if self.closed:
                    nixl.release(self.nixl_memory)
        if self.closed:
            raise self.loss()
        return found

    def nixl_memory(self, name: str) -> set[NixlMemory]:
        return {one.nixl for one in self.sources if one.nixl and one.nixl.agent == name}

    def observe(self, fetched: Fetched) -> None:
        """Learn the duration of a completed fetch, unless it waited for tokens."""
        stages = fetched.stages_s
        if not (stages.awaiting or stages.waiting):
            seconds = stages.queued + stages.acquiring + stages.reading + stages.committing
            self.learned.setdefault(fetched.path, Learned()).observe(fetched.num_bytes, seconds)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Memory of a prefill engine at one agent, as one route reads it.

    ``engine_instance`` is empty if the agent is not the engine's home. ``nixl`` is None if all of
    the route is mapped. ``unmapped`` is the reason for no ``mapped``. ``fault`` is about the memory
    kinds of the staging slots.
    """

    remote: RemoteAgent
    engine_id: str
    engine_instance: str
    nixl: NixlMemory | None
    memory_id: str
    rank_secret: str = field(repr=False)
    slot_bytes: int
    ranks: Mapping[int, PlacedRank]
    nixl_peer: NixlPeer | None = None
    remotes: Mapping[int, Defined] = field(default_factory=dict)
    mapped: MappedMemory | None = None
    unmapped: str = ""
    fault: Fault | None = None

    @property
    def peer(self) -> Peer:
        return self.remote.peer

    @property
    def agent_boot(self) -> str:
        return self.remote.boot

    @property
    def is_mapped(self) -> bool:
        return self.mapped is not None and not self.mapped.closed

    @property
    def nixl_agent(self) -> str:
        return self.nixl.agent if self.nixl else ""

    @property
    def is_undriven(self) -> bool:
        """Whether READs end without progress of the peer, as over CMA."""
        return self.nixl_peer is not None and self.nixl_peer.is_undriven

    @property
    def named(self) -> dict[str, str]:
        return {
            "agent_boot": self.agent_boot,
            "engine_id": self.engine_id,
            "memory_id": self.memory_id,
            "rank_secret": self.rank_secret,
        }

    def check(self, offer_id: str, *, progress_s: float = 0.0, nixl_agent: str = "") -> CheckMemory:
        request = {"offer_id": offer_id, "nixl_agent": nixl_agent}
        return CheckMemory(**self.named, **request, progress_s=progress_s)

    def await_work(self, after: int) -> AwaitWork:
        return AwaitWork(**self.named, after=after)

    def request(
        self,
        message: Request[Any],
        timeout_s: float,
        on_reply: OnReply[Any],
        *,
        of: FailureOf = "memory",
    ) -> None:

        def settle(reply: Any) -> None:
            if isinstance(reply, KVBusError):
                self.note_failure(reply, of)
            on_reply(reply)

        self.peer.request(message, timeout_s, settle)

    async def query(self, message: Request[R], timeout_s: float) -> R:
        try:
            return await self.peer.client.request(message, timeout_s=timeout_s)
        except KVBusError as error:
            self.note_failure(error, "memory")
            raise

    def note_failure(self, error: KVBusError, of: FailureOf) -> None:
        self.remote.note_failure(error, self, of)

    def note_read(self, error: KVBusError | None, *, undriven: bool) -> None:
        if error is not None:
            self.note_failure(error, "read")
        elif self.nixl_peer is not None:
            self.nixl_peer.note_read(undriven)
