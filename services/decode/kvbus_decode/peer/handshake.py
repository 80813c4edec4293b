"""Routes and the handshakes that make them: with an engine's home, then with each other agent.

Refuses an engine whose KV ours cannot use; both sides log the field and both values.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import anyio
import structlog
from msgspec import structs

from kvbus.agent.engines import LocalEngine
from kvbus.agent.loop import guarded, in_thread
from kvbus.agent.service import Agent
from kvbus.errors import ErrorCode, GeometryError, KVBusError, RequestTimeout
from kvbus.planning import check_compatible
from kvbus.protocol.engine import AgentRanks
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.peer import EngineMemory, Handshake, HandshakeDone
from kvbus.protocol.ticket import Ticket
from kvbus_decode.config import DecodeConfig
from kvbus_decode.peer.borrowing import MemoryBorrower, is_near
from kvbus_decode.peer.directory import Peer, PeerAddress, PeerDirectory
from kvbus_decode.peer.handshake_client import ask_any_handshake, ask_handshake
from kvbus_decode.peer.mapped_memory import MappedMemory
from kvbus_decode.peer.nixl import NixlMemory, NixlPeers
from kvbus_decode.peer.route import Route, Source, placed_ranks

log = structlog.get_logger()

Answer = TypeVar("Answer")

REASON_GRACE_S = 0.5
"""A handshake that ends in time knows better than who waits for it which agent did not answer."""


OF_THE_TICKET = frozenset(
    {
        ErrorCode.FORBIDDEN,
        ErrorCode.OFFER_UNKNOWN,
        ErrorCode.OFFER_WITHDRAWN,
        ErrorCode.OFFER_EXPIRED,
        ErrorCode.OFFER_COMPLETED,
    }
)
"""Why a handshake is refused to one ticket, and may not be to another of the same engine."""


@dataclass(frozen=True, slots=True)
class _Round:
    """Handshakes for one reader; those with a ``machine`` may bring nothing for NIXL.

    ``lent`` is what is mapped of each agent's boot id and memory id, or why it is not.
    """

    engine: LocalEngine
    deadline: float
    machine: str = ""
    lent: dict[tuple[str, str], MappedMemory | str] = field(default_factory=dict)


class _OtherTicketRefusedError(Exception):
    """The handshake that was waited for showed a ticket that is no good."""


@dataclass(frozen=True, slots=True)
class RouteKey:
    """What must not have changed for a route to be used again."""

    endpoint: str
    agent_boot: str
    engine_id: str
    engine_instance: str
    memory_id: str


class RouteBook:
    """All routes, and the handshakes under way."""

    def __init__(self, agent: Agent, config: DecodeConfig, peers: PeerDirectory) -> None:
        self._agent, self._peers = agent, peers
        self._nixl = NixlPeers(agent.transport)
        self.borrower = MemoryBorrower(agent, config, self._forget_mapped)
        """The memory that is mapped here."""
        self._routes: dict[RouteKey, Route] = {}
        self._shaking: dict[RouteKey, asyncio.Future[Route]] = {}
        self._max_refusals = config.max_peers
        self.refusals: dict[str, str] = {}
        """Of each agent with which the last handshake came to nothing, why."""

    def __iter__(self) -> Iterator[Route]:
        return iter(list(self._routes.values()))

    def find(self, ticket: Ticket, engine: LocalEngine) -> Route | None:
        """The route, if it is known and can be read."""
        route = self._routes.get(_key(ticket, engine))
        return route if route is not None and _can_be_read(route.sources) else None

    def between(self, endpoint: str, engine_id: str, engine: LocalEngine) -> Route | None:
        """The route from an engine of the agent there; without a name, the only one it has."""
        found = [
            route
            for key, route in self._routes.items()
            if (key.endpoint, key.memory_id) == (endpoint, engine.memory_id)
            and engine_id in ("", key.engine_id)
        ]
        return found[0] if len(found) == 1 else None

    def num_from(self, endpoint: str) -> int:
        """Routes from engines of the agent there."""
        return sum(key.endpoint == endpoint for key in self._routes)

    async def route(
        self, peer: Peer, ticket: Ticket, engine: LocalEngine, *, timeout_s: float
    ) -> Route:
        """The route for ``ticket`` into ``engine``, by a handshake when it is not known.

        Fetches that need the same handshake wait for one; it is made again for those whose ticket
        is better than the one that was shown. Raises `KVBusError`.
        """
        with anyio.move_on_after(timeout_s + REASON_GRACE_S):
            while True:
                known = self.find(ticket, engine)
                if known is not None:
                    return known
                try:
                    return await self._wait_for(peer, ticket, engine, timeout_s)
                except _OtherTicketRefusedError:
                    continue
        raise RequestTimeout(
            f"no handshake with {peer.endpoint} within {timeout_s:g} s",
            code=ErrorCode.PEER_UNREACHABLE,
            endpoint=peer.endpoint,
        )

    async def _wait_for(
        self, peer: Peer, ticket: Ticket, engine: LocalEngine, timeout_s: float
    ) -> Route:
        """The route of the handshake under way, or of ours; raises `KVBusError`."""
        key = _key(ticket, engine)
        shaking = self._shaking.get(key)
        is_ours = shaking is None
        if shaking is None:
            shaking = self._shaking[key] = self._agent.loop.create_future()
            self._agent.tasks.start_soon(self._shake_hands, key, peer, ticket, engine, timeout_s)
        try:
            return await asyncio.shield(shaking)
        except KVBusError as error:
            if is_ours or error.code not in OF_THE_TICKET:
                raise
        raise _OtherTicketRefusedError

    def forget(self, route: Route) -> None:
        """The route is of no use: the next fetch shakes hands again."""
        self._routes = {key: known for key, known in self._routes.items() if known is not route}

    def forget_multi_agent(self, ticket: Ticket) -> None:
        """A fetch of this ticket failed: routes from its engine are of no use if it is spread."""
        spread = ticket.agent_boot, ticket.engine_instance
        self._keep_only(
            lambda key, route: (
                (key.agent_boot, key.engine_instance) != spread or len(route.sources) == 1
            )
        )

    def forget_connection(self, agent_boot: str) -> None:
        """UCX has given up a connection of routes from this agent: they, and it, are made anew."""
        for route in [route for key, route in self._routes.items() if key.agent_boot == agent_boot]:
            for source in route.sources:
                self._nixl.break_off(source.nixl_agent)
        self._keep_only(lambda key, _: key.agent_boot != agent_boot)

    def forget_engine(self, engine: LocalEngine) -> None:
        """Drop the routes into an engine that is gone."""
        memory_id = engine.memory_id
        self._keep_only(lambda key, _: key.memory_id != memory_id)

    def forget_peer(self, peer: Peer) -> None:
        """Drop the routes through a peer, its NIXL agents, and what was refused."""
        self.refusals.pop(peer.endpoint, None)
        self._keep_only(lambda _, route: all(source.peer is not peer for source in route.sources))
        self._forget_nixl(peer)

    def see_boot(self, peer: Peer, boot: str) -> list[str]:
        """A peer's boot id; returns the earlier ones whose offers are lost with their process."""
        self.refusals.pop(peer.endpoint, None)
        old = {
            (route, source)
            for route in self._routes.values()
            for source in route.sources
            if source.peer is peer and source.agent_boot != boot
        }
        lost = {route for route, _ in old}
        self._keep_only(lambda _, route: route not in lost)
        self._forget_nixl(peer)
        return sorted({source.agent_boot for route, source in old if source is route.home})

    def _forget_mapped(self, memory: MappedMemory) -> None:
        """Memory that is zeros now: routes that copy from it are made anew."""
        self._keep_only(lambda _, route: all(one.mapped is not memory for one in route.sources))

    def _keep_only(self, wanted: Callable[[RouteKey, Route], bool]) -> None:
        self._routes = {key: route for key, route in self._routes.items() if wanted(key, route)}

    def _sources(self) -> set[Source]:
        return {source for route in self._routes.values() for source in route.sources}

    def _forget_nixl(self, peer: Peer) -> None:
        """NIXL's agents for a peer that no route needs go, once nothing of them is in flight."""
        for name in self._nixl.names_of(peer):
            is_used = partial(self._is_nixl_used, name)
            self._agent.tasks.start_soon(self._nixl.forget, peer, name, is_used)

    def _is_nixl_used(self, name: str) -> bool:
        return any(source.nixl_agent == name for source in self._sources())

    async def _shake_hands(
        self, key: RouteKey, peer: Peer, ticket: Ticket, engine: LocalEngine, timeout_s: float
    ) -> None:
        waiting = self._shaking[key]
        bound = log.bind(peer=ticket.agent_id, engine_id=ticket.engine_id)

        async def shake() -> None:
            route = await self._negotiate(peer, ticket, engine, timeout_s)
            bound.info("handshake.done", reader=engine.engine_id, num_agents=len(route.sources))
            self._keep(key, route)
            waiting.set_result(route)

        def fail(error: KVBusError) -> None:
            if error.code not in OF_THE_TICKET:
                self._remember(key.endpoint, error.message)
            bound.warning(
                "handshake.refused",
                code=error.code,
                reason=error.message,
                **{f"detail_{name}": value for name, value in error.detail.items()},
            )
            waiting.set_exception(error)
            waiting.exception()  # marks it as seen: its waiters may all have given up

        await guarded(shake, fail)
        del self._shaking[key]

    def _remember(self, endpoint: str, refusal: str) -> None:
        self.refusals.pop(endpoint, None)
        self.refusals[endpoint] = refusal
        if len(self.refusals) > self._max_refusals:
            del self.refusals[next(iter(self.refusals))]

    async def _negotiate(
        self, peer: Peer, ticket: Ticket, engine: LocalEngine, timeout_s: float
    ) -> Route:
        deadline = self._agent.loop.time() + timeout_s
        first = _Round(engine, deadline, self.borrower.machine(engine))
        done, sources = await self._meet_all(peer, ticket, first)
        if not _can_be_read(sources):
            second = replace(first, machine="")
            done, sources = await self._meet_all(peer, ticket, second)
        return await in_thread(Route, done.memory.engine, sources, engine)

    async def _meet_all(
        self, peer: Peer, ticket: Ticket, shaken: _Round
    ) -> tuple[HandshakeDone, tuple[Source, ...]]:
        """The home's handshake, and all sources."""
        handshake = structs.replace(
            self._handshake(shaken, ticket.engine_id),
            engine_instance=ticket.engine_instance,
            offer_id=ticket.offer_id,
            secret=ticket.secret or None,
        )
        timeout_s = max(1e-3, shaken.deadline - self._agent.loop.time())
        asking = ask_handshake(peer.client, ticket, handshake, timeout_s=timeout_s)
        done = await asking
        check_compatible(done.memory.engine, shaken.engine.spec)
        home = await self._source(peer, ticket.agent_boot, done, shaken)
        self._peers.listen(peer, done.events_endpoint)
        others = [await self._meet(other, done, shaken) for other in done.others]
        return done, (home, *others)

    async def _meet(self, other: AgentRanks, home: HandshakeDone, shaken: _Round) -> Source:
        """The handshake with an agent that has some ranks of the engine, but not its leases."""
        peer = self._peers.acquire(PeerAddress(other.endpoint, other.server_key))
        try:
            handshake = structs.replace(
                self._handshake(shaken, home.memory.engine.engine_id),
                ranks=other.ranks,
                access=other.access,
            )
            timeout_s = max(1e-3, shaken.deadline - self._agent.loop.time())
            asking = ask_any_handshake(peer.client, handshake, timeout_s=timeout_s)
            boot, done = await asking
            if done.memory.engine != home.memory.engine:
                raise GeometryError(
                    f"the agents of engine '{home.memory.engine.engine_id}' disagree about it",
                    code=ErrorCode.INCOMPATIBLE,
                    field="engine",
                )
            return await self._source(peer, boot, done, shaken)
        finally:
            self._peers.release(peer)

    def _handshake(self, shaken: _Round, engine_id: str) -> Handshake:
        """But for the right to it."""
        ours = shaken.engine.memory()
        return Handshake(
            min_protocol=PROTOCOL_VERSION,
            max_protocol=PROTOCOL_VERSION,
            agent_id=self._agent.identity.agent_id,
            engine_id=engine_id,
            reader=EngineMemory(engine=ours.engine, ranks=ours.ranks),
            machine=shaken.machine,
        )

    # Agents of one machine and user copy from mapped memory. Then NIXL is told of nothing, and as
    # long as it is needed for no peer its backend is not open: over TCP it listens where any user
    # of the machine reaches it. So the first round of handshakes asks for memory to map; the second
    # one, for NIXL's metadata, follows only where some of the memory cannot be mapped.
    async def _source(self, peer: Peer, boot: str, done: HandshakeDone, shaken: _Round) -> Source:
        placed = await in_thread(placed_ranks, done.memory)  # ms a rank
        place, lent = (boot, done.memory_id), shaken.lent
        if place not in lent:
            within_s = shaken.deadline - self._agent.loop.time()
            lent[place] = await self.borrower.borrow(boot, done, shaken.engine, within_s=within_s)
        borrowed, memory = lent[place], None
        if done.nixl_metadata and not (shaken.machine and isinstance(borrowed, MappedMemory)):
            memory = NixlMemory.of(done)
            live = [one.nixl for one in self._sources() if one.peer is peer and one.nixl]
            await self._agent.data_plane.open()
            await self._nixl.add(peer, memory, live, deadline=shaken.deadline)
            if not self._is_met(peer):
                self._forget_nixl(peer)
                raise peer.loss()
            await self._agent.data_plane.end_if_exposed()
        return Source(
            peer=peer,
            agent_boot=boot,
            nixl=memory,
            memory_id=done.memory_id,
            access=done.access,
            slot_bytes=done.slot_bytes,
            ranks=placed,
            near=is_near(done),
            mapped=borrowed if isinstance(borrowed, MappedMemory) else None,
            unmapped=borrowed if isinstance(borrowed, str) else "",
            digests=done.digests,
        )

    def _keep(self, key: RouteKey, route: Route) -> None:
        """Remember a route, in place of those of the prefill engine's earlier processes.

        Not if one of its ends went during the handshake: nothing would say so again.
        """
        if route.engine.lost or not all(map(self._is_good, route.sources)):
            return
        home, engine_id = route.home.peer, route.prefill.engine_id
        self._keep_only(
            lambda known, other: (
                other.home.peer is not home
                or other.prefill.engine_id != engine_id
                or known.engine_instance == key.engine_instance
            )
        )
        self._routes[key] = route
        self.refusals.pop(key.endpoint, None)

    def _is_good(self, source: Source) -> bool:
        """Whether the source is what it was when hands were shaken."""
        is_same = source.peer.boot in ("", source.agent_boot)
        is_mapped = source.mapped is None or source.mapped.is_open
        return is_same and is_mapped and self._is_met(source.peer)

    def _is_met(self, peer: Peer) -> bool:
        """Whether the peer was not dropped since."""
        return self._peers.find(peer.address) is peer


def _can_be_read(sources: Iterable[Source]) -> bool:
    """Whether all of it is mapped, or NIXL was told of all."""
    mapped = [one.mapped is not None and one.mapped.is_open for one in sources]
    return all(mapped) or all(one.nixl for one in sources)


def _key(ticket: Ticket, engine: LocalEngine) -> RouteKey:
    return RouteKey(
        endpoint=ticket.endpoint,
        agent_boot=ticket.agent_boot,
        engine_id=ticket.engine_id,
        engine_instance=ticket.engine_instance,
        memory_id=engine.memory_id,
    )
