"""The prefill agents that this agent talks to: connections, handshakes, and their end.

Refuses more peers than the limit while all of them are in use.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import structlog

from kvbus.agent.guard import guarded
from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.service import Agent
from kvbus.bus import EventListener, EventSubscriber, RequestClient
from kvbus.errors import (
    ErrorCode,
    GeometryError,
    KVBusError,
    LocalError,
    RequestTimeout,
    TransferFailed,
)
from kvbus.geometry import validate_engine, validate_rank
from kvbus.planning import DirectPlan, PlacedRank, check_compatible
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.message import from_body
from kvbus.protocol.peer import EngineMemory, Handshake, HandshakeDone
from kvbus.protocol.ticket import Ticket
from kvbus_decode.config import DecodeConfig
from kvbus_decode.introductions import introduce

log = structlog.get_logger()

RouteKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Route:
    """How one decode engine reads one prefill engine: the plan, and NIXL's name of the agent."""

    engine_id: str
    plan: DirectPlan
    nixl_agent: str


@dataclass(slots=True, eq=False)
class Peer:
    """One prefill agent, by the endpoint in its tickets.

    ``routes`` are keyed by the boot ids of the agent, of its engine, and of our engine.
    """

    endpoint: str
    client: RequestClient
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    routes: dict[RouteKey, Route] = field(default_factory=dict)
    shaking: dict[RouteKey, asyncio.Future[Route]] = field(default_factory=dict)
    nixl_agents: set[str] = field(default_factory=set)
    events_endpoint: str = ""
    num_fetches: int = 0


class PeerDirectory:
    """All peers; a fetch holds its peer from `acquire` to `release`.

    ``on_lost`` gets the boot id of an agent that came back as another, ``listener`` its events.
    """

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        *,
        on_lost: Callable[[str], None],
        listener: EventListener,
    ) -> None:
        self._agent, self._config, self._on_lost = agent, config, on_lost
        self._peers: dict[str, Peer] = {}
        self._subscriber = EventSubscriber(
            agent.context,
            listener,
            topics=("offer.extended", "offer.sealed", "lease.revoked", "lease.expired"),
            silence_s=config.silence_s,
            max_endpoints=config.max_peers,
            on_fault=_log_fault,
        )
        agent.tasks.start_soon(self._subscriber.run)

    def __len__(self) -> int:
        return len(self._peers)

    def acquire(self, endpoint: str) -> Peer:
        """The peer at ``endpoint``, connected when it is new; raises `LocalError` (``busy``)."""
        peer = self._peers.pop(endpoint, None) or self._connect(endpoint)
        self._peers[endpoint] = peer  # the latest used is the last to make room
        peer.num_fetches += 1
        return peer

    def find(self, endpoint: str) -> Peer | None:
        """The peer at ``endpoint``, if it is known."""
        return self._peers.get(endpoint)

    def release(self, peer: Peer) -> None:
        """A fetch has ended."""
        peer.num_fetches -= 1

    async def route(
        self, peer: Peer, ticket: Ticket, engine: LocalEngine, *, timeout_s: float
    ) -> Route:
        """The route for ``ticket`` into ``engine``, after a handshake when there is none yet.

        Fetches that need the same handshake wait for one. Raises `KVBusError`.
        """
        key = route_key(ticket, engine)
        shaking = peer.shaking.get(key)
        if shaking is None:
            shaking = peer.shaking[key] = asyncio.get_running_loop().create_future()
            self._agent.tasks.start_soon(self._shake_hands, peer, ticket, engine, timeout_s)
        with anyio.move_on_after(timeout_s):
            return await asyncio.shield(shaking)
        raise RequestTimeout(
            f"no handshake with {peer.endpoint} within {timeout_s:g} s",
            code=ErrorCode.PEER_UNREACHABLE,
            endpoint=peer.endpoint,
        )

    def forget_engine(self, engine: LocalEngine) -> None:
        """Drop the routes into an engine that is gone."""
        for peer in self._peers.values():
            for key in [key for key in peer.routes if key[2] == engine.boot]:
                del peer.routes[key]

    def _connect(self, endpoint: str) -> Peer:
        if len(self._peers) >= self._config.max_peers:
            self._drop_idle()
        client = RequestClient(
            self._agent.context,
            endpoint,
            boot=self._agent.identity.boot,
            on_boot=lambda boot: self._see_boot(endpoint, boot),
            on_fault=_log_fault,
        )
        peer = Peer(endpoint, client)
        self._agent.tasks.start_soon(self._run, peer)
        return peer

    async def _run(self, peer: Peer) -> None:
        with peer.scope:
            await peer.client.run()

    def _drop_idle(self) -> None:
        idle = next((peer for peer in self._peers.values() if not peer.num_fetches), None)
        if idle is None:
            raise LocalError(
                f"{len(self._peers)} prefill agents are in use, which is the limit",
                code=ErrorCode.BUSY,
            )
        del self._peers[idle.endpoint]
        self._agent.tasks.start_soon(self._forget_nixl, idle)
        self._subscriber.remove(idle.events_endpoint)
        idle.scope.cancel()

    def _see_boot(self, endpoint: str, boot: str) -> None:
        """Called with the agent's first boot id, and with each other that follows it."""
        peer = self._peers.get(endpoint)
        if peer is None:
            return
        old = {key[0] for key in peer.routes} - {boot}
        if not old:
            return
        log.warning("peer.restarted", peer=endpoint, peer_boot=boot)
        peer.routes = {key: route for key, route in peer.routes.items() if key[0] == boot}
        for lost in old:
            self._on_lost(lost)
        self._agent.tasks.start_soon(self._forget_nixl, peer)

    async def _forget_nixl(self, peer: Peer) -> None:
        """Remove the NIXL agents of earlier boots; one that still writes to us has to stay."""
        for name in list(peer.nixl_agents - {route.nixl_agent for route in peer.routes.values()}):
            try:
                await asyncio.wrap_future(self._agent.transport.remove_peer(name))
                peer.nixl_agents.discard(name)
            except KVBusError as error:
                log.warning("peer.kept", peer=peer.endpoint, nixl_agent=name, reason=error.message)

    async def _shake_hands(
        self, peer: Peer, ticket: Ticket, engine: LocalEngine, timeout_s: float
    ) -> None:
        key = route_key(ticket, engine)
        waiting = peer.shaking[key]
        bound = log.bind(peer=ticket.agent_id, engine_id=ticket.engine_id)

        async def shake() -> None:
            route = await self._negotiate(peer, ticket, engine, timeout_s)
            bound.info("handshake.done", reader=engine.engine_id)
            self._keep(peer, key, route)
            waiting.set_result(route)

        def fail(error: KVBusError) -> None:
            bound.warning("handshake.refused", code=error.code, reason=error.message)
            waiting.set_exception(error)
            waiting.exception()  # marks it as seen: its waiters may all have given up

        await guarded(shake, fail)
        del peer.shaking[key]

    async def _negotiate(
        self, peer: Peer, ticket: Ticket, engine: LocalEngine, timeout_s: float
    ) -> Route:
        ours = engine.memory()
        handshake = Handshake(
            min_protocol=PROTOCOL_VERSION,
            max_protocol=PROTOCOL_VERSION,
            agent_boot=self._agent.identity.boot,
            agent_id=self._agent.identity.agent_id,
            engine_id=ticket.engine_id,
            engine_boot=ticket.engine_boot,
            reader=EngineMemory(engine=ours.engine, ranks=ours.ranks),
        )
        reply = await introduce(peer.client, ticket, handshake, timeout_s=timeout_s)
        done = from_body(HandshakeDone, reply)
        theirs = done.memory
        placed = _placed(theirs)
        check_compatible(theirs.engine, theirs.ranks, ours.engine, ours.ranks)
        name = await self._add_nixl(peer, done)
        peer.nixl_agents.add(name)
        self._listen(peer, done.events_endpoint)
        return Route(ticket.engine_id, DirectPlan(placed, engine.placed()), name)

    async def _add_nixl(self, peer: Peer, done: HandshakeDone) -> str:
        """Give NIXL the peer's registrations, or what is new of them.

        Fabrics with keys refuse a region that is registered again, after its engine restarted, and
        NIXL has then dropped the peer: every route to it is made again.
        """
        transport = self._agent.transport
        try:
            return await asyncio.wrap_future(transport.add_peer(done.nixl_metadata))
        except TransferFailed:
            if done.nixl_agent not in peer.nixl_agents:
                raise
        peer.routes.clear()
        await asyncio.wrap_future(transport.remove_peer(done.nixl_agent))
        return await asyncio.wrap_future(transport.add_peer(done.nixl_metadata))

    def _keep(self, peer: Peer, key: RouteKey, route: Route) -> None:
        """Remember a route, in place of those of the prefill engine's earlier processes."""
        gone = [
            known
            for known, other in peer.routes.items()
            if other.engine_id == route.engine_id and known[1] != key[1]
        ]
        for known in gone:
            del peer.routes[known]
        peer.routes[key] = route

    def _listen(self, peer: Peer, endpoint: str) -> None:
        if peer.events_endpoint != endpoint:
            self._subscriber.remove(peer.events_endpoint)
            peer.events_endpoint = endpoint
        self._subscriber.add(endpoint)


def _log_fault(error: Exception) -> None:
    """A defect in handling one message of one peer; the others go on."""
    log.error("peer.message_failed", exc_info=error)


def route_key(ticket: Ticket, engine: LocalEngine) -> RouteKey:
    """What must not have changed for a route to be used again."""
    return ticket.agent_boot, ticket.engine_boot, engine.boot


def _placed(memory: EngineMemory) -> list[PlacedRank]:
    """The peer's ranks for the planner; raises `GeometryError` for what cannot be."""
    validate_engine(memory.engine)
    if len(memory.addresses) != len(memory.ranks):
        raise GeometryError(f"{len(memory.ranks)} ranks with {len(memory.addresses)} addresses")
    placed: list[PlacedRank] = []
    for rank, addresses in zip(memory.ranks, memory.addresses, strict=True):
        validate_rank(memory.engine, rank)
        if not {segment.segment_id for segment in rank.segments} <= addresses.keys():
            raise GeometryError(f"rank {rank.rank} has segments without an address")
        placed.append(PlacedRank(memory.engine, rank, addresses))
    return placed
