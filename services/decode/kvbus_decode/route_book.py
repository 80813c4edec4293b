"""Routes and the handshakes that make them: with an engine's home, then with each other agent.

An engine whose KV ours cannot use is refused; both sides log the field and both values.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import anyio
import structlog

from kvbus.agent.engine import LocalEngine
from kvbus.agent.loop import in_thread
from kvbus.agent.service import Agent
from kvbus.bus import RequestClient
from kvbus.data.client import Defined
from kvbus.errors import (
    ErrorCode,
    GeometryError,
    KVBusError,
    PeerLost,
    RemoteError,
    RequestRefused,
    RequestTimeout,
)
from kvbus.planning import check_compatible
from kvbus.protocol.engine import AgentRanks
from kvbus.protocol.envelope import PROTOCOL_VERSION, Notice
from kvbus.protocol.peer import Handshake, HandshakeDone
from kvbus.protocol.ticket import Ticket
from kvbus_decode.mapped import MappedMemory, MemoryBorrower
from kvbus_decode.nixl_peers import NixlMemory, NixlPeers
from kvbus_decode.peers import ENGINE_LOST, Peer, PeerAddress, PeerDirectory, PeerWatcher
from kvbus_decode.route import Route, Source, add_remotes, placed_ranks

log = structlog.get_logger()

MAX_ROUTES, IDLE_ROUTE_S = 4096, 600.0
"""Routes of engines whose end was missed go when others are made: the least used, or by age."""


@dataclass(frozen=True, slots=True)
class _Round:
    """Handshakes for one reader; those with a ``machine`` may bring nothing for NIXL.

    ``lent`` is what is mapped of each agent's boot id and memory id, or why it is not.
    """

    engine: LocalEngine
    deadline: float
    machine: str
    lent: dict[tuple[str, str], MappedMemory | str] = field(default_factory=dict)


class RouteKey(NamedTuple):
    """What must not have changed for a route to be used again."""

    endpoint: str
    engine_id: str
    engine_instance: str
    memory_id: str

    @classmethod
    def of(cls, ticket: Ticket, engine: LocalEngine) -> "RouteKey":
        """From the engine that a ticket names into one that is here."""
        return cls(
            endpoint=ticket.endpoint,
            engine_id=ticket.engine_id,
            engine_instance=ticket.engine_instance,
            memory_id=engine.memory_id,
        )


class RouteBook(PeerWatcher):
    """All routes, and the handshakes under way."""

    def __init__(self, agent: Agent, peers: PeerDirectory, borrower: MemoryBorrower) -> None:
        self._agent, self._peers, self.borrower = agent, peers, borrower
        self.nixl = NixlPeers(agent.data, self._nixl_memory)
        self._routes: dict[RouteKey, Route] = {}
        self._turns = WeakValueDictionary[RouteKey, anyio.Lock]()
        """Where one handshake is under way, the others wait."""
        borrower.on_end = self._forget_mapped

    def __iter__(self) -> Iterator[Route]:
        return iter(list(self._routes.values()))

    def find(self, ticket: Ticket, engine: LocalEngine) -> Route | None:
        """The route, if it is known and can be read."""
        route = self._routes.get(RouteKey.of(ticket, engine))
        if route is None or not _can_be_read(route.sources):
            return None
        route.used_at = self._agent.loop.time()
        return route

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
        return sum(key.endpoint == endpoint for key in self._routes)

    async def route(
        self, peer: Peer, ticket: Ticket, engine: LocalEngine, *, timeout_s: float
    ) -> Route:
        """The route for ``ticket`` into ``engine``, by a handshake when it is not known.

        Fetches that need the same handshake wait for one, and make their own if it fails: its
        ticket may have been no good. Raises `KVBusError`.
        """
        key, deadline = RouteKey.of(ticket, engine), self._agent.loop.time() + timeout_s
        async with self._turns.setdefault(key, anyio.Lock()):
            if (known := self.find(ticket, engine)) is not None:
                return known
            if self._agent.loop.time() < deadline:
                return await self._shake_hands(key, peer, ticket, engine, deadline)
        raise RequestTimeout(
            f"no handshake with {peer.endpoint} within {timeout_s:g} s: {peer.refusal}",
            code=ErrorCode.PEER_UNREACHABLE,
            endpoint=peer.endpoint,
        )

    def forget(self, route: Route) -> None:
        """The route is of no use: the next fetch shakes hands again."""
        self._keep_only(lambda _, known: known is not route)

    def forget_engine(self, engine: LocalEngine) -> None:
        self._keep_only(lambda key, _: key.memory_id != engine.memory_id)

    def on_gone(self, peer: Peer, boot: str) -> None:
        """Drop the routes through a process that is gone: a handshake waits for the next one."""
        self._keep_only(
            lambda _, route: all(
                source.peer is not peer or boot not in ("", source.agent_boot)
                for source in route.sources
            )
        )

    def on_dropped(self, peer: Peer) -> None:
        """Drop the routes through it, and its NIXL agents."""
        self._keep_only(lambda _, route: all(source.peer is not peer for source in route.sources))
        self.nixl.forget(peer)

    def on_event(self, peer: Peer, event: Notice) -> None:
        """Drop the routes from a prefill engine that has ended."""
        if event.op != ENGINE_LOST:
            return
        name, instance = event.body.get("engine_id"), event.body.get("engine_instance")
        self._keep_only(
            lambda key, route: (
                key.engine_id != name
                or (route.home.peer is peer and key.engine_instance != instance)
                or all(source.peer is not peer for source in route.sources)
            )
        )

    def on_boot(self, peer: Peer, boot: str, earlier: str) -> None:
        """Drop the routes through its earlier process."""
        self._keep_only(
            lambda _, route: all(
                source.peer is not peer or source.agent_boot == boot for source in route.sources
            )
        )
        self.nixl.forget(peer)

    def _forget_mapped(self, memory: MappedMemory) -> None:
        """Memory that is zeros now: routes that copy from it are made again."""
        self._keep_only(lambda _, route: all(one.mapped is not memory for one in route.sources))

    def _keep_only(self, wanted: Callable[[RouteKey, Route], bool]) -> None:
        for key, route in list(self._routes.items()):
            if not wanted(key, route):
                del self._routes[key]
                route.close()

    # A prefill agent replaces its data process, and lives on: then its NIXL agent has another name,
    # and what it registered lies elsewhere. A READ from the one before must not be served by the
    # next one, which may have other memory there.
    def _forget_earlier(self, peer: Peer, nixl_agent: str) -> None:
        """Drop routes that read from an earlier data process of a peer."""
        self._keep_only(
            lambda _, route: all(
                source.peer is not peer or source.nixl_agent in ("", nixl_agent)
                for source in route.sources
            )
        )
        self.nixl.forget(peer, but=nixl_agent)

    def _nixl_memory(self) -> Iterator[NixlMemory]:
        for route in self._routes.values():
            yield from (source.nixl for source in route.sources if source.nixl is not None)

    async def _shake_hands(
        self, key: RouteKey, peer: Peer, ticket: Ticket, engine: LocalEngine, deadline: float
    ) -> Route:
        bound = log.bind(peer=ticket.agent_id, engine_id=ticket.engine_id)
        try:
            route = await self._negotiate(peer, ticket, engine, deadline)
        except KVBusError as error:
            peer.refusal = error.message
            bound.warning(
                "handshake.refused",
                code=error.code,
                reason=error.message,
                **{f"detail_{name}": value for name, value in error.detail.items()},
            )
            raise
        bound.info("handshake.done", reader=engine.engine_id, num_agents=len(route.sources))
        self._keep(key, route)
        return route

    # Agents of one machine and user copy from mapped memory. Then NIXL is told of nothing, and as
    # long as it is needed for no peer its backend is not open: over TCP it listens where any user
    # of the machine reaches it. So the first round of handshakes asks for memory to map; the second
    # one, for NIXL's metadata, follows only where some of the memory cannot be mapped.
    async def _negotiate(
        self, peer: Peer, ticket: Ticket, engine: LocalEngine, deadline: float
    ) -> Route:
        first = _Round(engine, deadline, self.borrower.machine(engine))
        done, sources = await self._meet_all(peer, ticket, first)
        if not _can_be_read(sources):
            done, sources = await self._meet_all(peer, ticket, replace(first, machine=""))
        make = partial(Route, slot_bytes=self._agent.staging.slot_bytes, data=self._agent.data)
        return await in_thread(make, done.memory.engine, sources, engine)

    async def _meet_all(
        self, peer: Peer, ticket: Ticket, shaken: _Round
    ) -> tuple[HandshakeDone, tuple[Source, ...]]:
        """The home's handshake, and all sources."""
        done = await self._ask(
            peer,
            shaken,
            hint=ticket.agent_boot,
            engine_id=ticket.engine_id,
            engine_instance=ticket.engine_instance,
            offer_id=ticket.offer_id,
            secret=ticket.secret or None,
        )
        check_compatible(done.memory.engine, shaken.engine.spec)
        home = await self._source(peer, peer.client.peer_boot or "", done, shaken)
        self._peers.listen(peer, done.events_endpoint)
        return done, (home, *[await self._meet(other, done, shaken) for other in done.others])

    async def _meet(self, other: AgentRanks, home: HandshakeDone, shaken: _Round) -> Source:
        """The handshake with an agent that has some ranks of the engine, but not its leases."""
        engine_id = home.memory.engine.engine_id
        peer = self._peers.acquire(PeerAddress(other.endpoint, other.server_key))
        try:
            done = await self._ask(
                peer, shaken, engine_id=engine_id, ranks=other.ranks, access=other.access
            )
            if done.memory.engine != home.memory.engine:
                raise GeometryError(
                    f"the agents of engine '{engine_id}' disagree about it",
                    code=ErrorCode.INCOMPATIBLE,
                    field="engine",
                )
            return await self._source(peer, peer.client.peer_boot or "", done, shaken)
        except RequestRefused as error:  # the ticket does not name this agent
            message = f"the prefill agent at {peer.endpoint}: {error.message}"
            raise RemoteError(message, code=error.code, endpoint=peer.endpoint) from error
        finally:
            self._peers.release(peer)

    async def _ask(
        self, peer: Peer, shaken: _Round, *, hint: str = "", **wanted: Any
    ) -> HandshakeDone:
        """Return the reply of the process that answers.

        ``wanted`` are the engine, and the right to it. If another process than ``hint`` refuses, it
        may be another agent at the earlier address: its name is resolved again. Raises
        `KVBusError`: ``peer_unreachable``, or a refusal.
        """
        handshake = Handshake(
            min_protocol=PROTOCOL_VERSION,
            max_protocol=PROTOCOL_VERSION,
            agent_id=self._agent.identity.agent_id,
            reader=shaken.engine.spec,
            machine=shaken.machine,
            **wanted,
        )
        client, loop, address = peer.client, self._agent.loop, peer.client.address

        async def ask() -> HandshakeDone:
            timeout_s = max(1e-3, shaken.deadline - loop.time())
            return await client.ask(handshake, timeout_s=timeout_s)

        try:
            try:
                return await ask()
            except PeerLost:  # the first sign of a new process fails what that was asked as well
                return await ask()
        except RequestTimeout as error:
            raise _unreachable(client) from error
        except KVBusError as error:
            if not hint or client.peer_boot in (None, hint) or client.refusal:
                raise
            refused = error
        with anyio.move_on_after(shaken.deadline - loop.time()):
            if await client.has_moved(address):
                return await self._ask(peer, shaken, hint=hint, **wanted)
        raise refused

    async def _source(self, peer: Peer, boot: str, done: HandshakeDone, shaken: _Round) -> Source:
        placed = await in_thread(placed_ranks, done.memory)  # ms a rank
        place, lent = (boot, done.memory_id), shaken.lent
        if place not in lent:
            within_s = shaken.deadline - self._agent.loop.time()
            lent[place] = await self.borrower.borrow(boot, done, shaken.engine, within_s=within_s)
        borrowed, memory, nixl_peer, remotes = lent[place], None, None, dict[int, Defined]()
        if done.nixl_metadata and not (shaken.machine and isinstance(borrowed, MappedMemory)):
            memory = NixlMemory.of(done)
            await self._agent.data_plane.open()
            nixl_peer = await self._connect_nixl(peer, memory)
            await self._agent.data_plane.end_if_exposed()
            remotes = add_remotes(self._agent.data, done.memory, memory.agent, nixl_peer)
        return Source(
            peer=peer,
            agent_boot=boot,
            engine_id=done.memory.engine.engine_id,
            nixl=memory,
            memory_id=done.memory_id,
            access=done.access,
            slot_bytes=done.slot_bytes,
            ranks=placed,
            nixl_peer=nixl_peer,
            remotes=remotes,
            mapped=borrowed if isinstance(borrowed, MappedMemory) else None,
            unmapped=borrowed if isinstance(borrowed, str) else "",
        )

    async def _connect_nixl(self, peer: Peer, memory: NixlMemory) -> Defined:
        self._forget_earlier(peer, memory.agent)
        defined = await self.nixl.add(peer, memory)
        if not self._peers.has(peer):
            self.nixl.forget(peer)
            raise peer.loss()
        return defined

    def _keep(self, key: RouteKey, route: Route) -> None:
        """Remember a route, in place of those of the prefill engine's earlier processes.

        Not if one of its ends went during the handshake: nothing would say so again.
        """
        if route.engine.lost or not all(map(self._is_good, route.sources)):
            route.close()
            return
        home, engine_id = route.home.peer, route.prefill.engine_id
        self._keep_only(
            lambda known, other: (
                other.home.peer is not home
                or other.prefill.engine_id != engine_id
                or (known.engine_instance == key.engine_instance and known != key)
            )
        )
        self._routes[key], home.refusal = route, ""
        route.used_at = now = self._agent.loop.time()
        self._keep_only(lambda _, other: now - other.used_at < IDLE_ROUTE_S)
        if len(self._routes) > MAX_ROUTES:
            self._routes.pop(min(self._routes, key=lambda one: self._routes[one].used_at)).close()

    def _is_good(self, source: Source) -> bool:
        """Whether the source is what it was when hands were shaken."""
        is_same = source.peer.boot in ("", source.agent_boot)
        is_mapped = source.mapped is None or source.is_mapped
        return is_same and is_mapped and self._peers.has(source.peer)


def _can_be_read(sources: Iterable[Source]) -> bool:
    """Whether all of it is mapped, or NIXL was told of all."""
    return all(one.is_mapped for one in sources) or all(one.nixl for one in sources)


def _unreachable(client: RequestClient) -> RemoteError:
    """Says what is known of the way there, and where to look."""
    where, missing = client.endpoint, client.missing
    look = (
        f"{missing}. Is it up, is its advertise_host an address that this machine reaches, is the "
        "port open on the way?"
        if missing
        else "there is a connection, but nothing comes by it. Is the agent stopped (kvbus status "
        f"{where}), or are packets of full size lost on the way (MTU)?"
    )
    return RemoteError(
        f"no prefill agent answers at {where}: {look}",
        code=ErrorCode.PEER_UNREACHABLE,
        endpoint=where,
    )
