"""Routes, and the handshakes that create them: with an engine's home, then each other agent."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import anyio
import structlog

from kvbus.agent.data_plane import has_rdma
from kvbus.agent.identity import machine_id
from kvbus.agent.local_engine import LocalEngine, engine_lost
from kvbus.agent.loop import in_thread
from kvbus.agent.service import Agent
from kvbus.bus import RequestClient
from kvbus.data.client import Defined
from kvbus.data.messages import UCX
from kvbus.errors import (
    ErrorCode,
    GeometryError,
    KVBusError,
    PeerLost,
    RemoteError,
    RequestRefused,
    RequestTimeout,
    TransferFailed,
)
from kvbus.planning import check_compatible
from kvbus.protocol.engine import AgentRanks
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.peer import Handshake, HandshakeDone
from kvbus.protocol.ticket import Ticket
from kvbus.protocol.tools import Fault
from kvbus_decode.emulation import emulation_fault, is_emulated
from kvbus_decode.mapped import MappedMemory, MemoryBorrower
from kvbus_decode.nixl_peers import NixlMemory
from kvbus_decode.peers import PeerDirectory
from kvbus_decode.remote_agent import Peer, PeerAddress, RemoteAgent, Source
from kvbus_decode.route import Route, add_remotes, placed_ranks

log = structlog.get_logger()

LATE_S = 0.5
"""Extra time of a handshake after its requests, as their errors explain more."""
MAX_ROUTES, IDLE_ROUTE_S = 4096, 600.0
"""Limits above which a new route closes the least used ones: the end of an engine can be missed."""


@dataclass(frozen=True, slots=True)
class _Round:
    """Handshakes for one reader; with a ``machine`` the replies may lack NIXL metadata."""

    engine: LocalEngine
    deadline: float
    machine: str
    lent: dict[tuple[RemoteAgent, str], MappedMemory | str] = field(default_factory=dict)


class RouteKey(NamedTuple):
    endpoint: str
    server_key: str
    engine_id: str
    engine_instance: str
    memory_id: str

    @classmethod
    def of(cls, ticket: Ticket, engine: LocalEngine) -> "RouteKey":
        return cls(
            endpoint=ticket.endpoint,
            server_key=ticket.server_key,
            engine_id=ticket.engine_id,
            engine_instance=ticket.engine_instance,
            memory_id=engine.memory_id,
        )


class RouteBook:
    def __init__(self, agent: Agent, peers: PeerDirectory, borrower: MemoryBorrower) -> None:
        self._agent, self._peers, self.borrower = agent, peers, borrower
        self._routes: dict[RouteKey, Route] = {}
        self._warned: set[Fault] = set()
        self._turns = WeakValueDictionary[RouteKey, anyio.Lock]()

    def __iter__(self) -> Iterator[Route]:
        return iter(list(self._routes.values()))

    def find(self, ticket: Ticket, engine: LocalEngine) -> Route | None:
        route = self._routes.get(RouteKey.of(ticket, engine))
        if route is None or not _can_be_read(route.sources):
            return None
        route.used_at = self._agent.loop.time()
        return route

    def between(self, endpoint: str, engine_id: str, engine: LocalEngine) -> Route | None:
        """Without an ``engine_id``, return the route from the agent's only engine."""
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
        """Return the known route, or shake hands. Raises `KVBusError`.

        Fetches share a handshake. If it fails, each makes its own: the first ticket may have been
        invalid.
        """
        key, deadline = RouteKey.of(ticket, engine), self._agent.loop.time() + timeout_s
        with anyio.move_on_after(timeout_s + LATE_S):
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

    def remove_engine(self, engine: LocalEngine) -> None:
        for route in self:
            if route.engine is engine:
                route.close()

    async def _shake_hands(
        self, key: RouteKey, peer: Peer, ticket: Ticket, engine: LocalEngine, deadline: float
    ) -> Route:
        bound = log.bind(peer=ticket.agent_id, engine_id=ticket.engine_id)
        try:
            route = await self._negotiate(peer, ticket, engine, deadline)
            self._keep(key, route)
        except KVBusError as error:
            if error.code is ErrorCode.OFFER_PARKED:
                raise
            peer.refusal = error.message
            bound.warning(
                "handshake.refused",
                code=error.code,
                reason=error.message,
                **{f"detail_{name}": value for name, value in error.detail.items()},
            )
            raise
        bound.info("handshake.done", reader=engine.engine_id, num_agents=len(route.sources))
        return route

    # Agents of one machine and user copy from mapped memory and do not need NIXL. Its backend stays
    # closed until a peer needs it, as over TCP every user of the machine can reach its port. So the
    # first round of handshakes requests memory to map. The second one, for NIXL metadata, follows
    # only if some of the memory cannot be mapped.
    async def _negotiate(
        self, peer: Peer, ticket: Ticket, engine: LocalEngine, deadline: float
    ) -> Route:
        first = _Round(engine, deadline, self.borrower.machine(engine))
        done, sources = await self._handshake_all(peer, ticket, first)
        if not _can_be_read(sources):
            done, sources = await self._handshake_all(peer, ticket, replace(first, machine=""))
        make = partial(Route, slot_bytes=self._agent.staging.slot_bytes, data=self._agent.data)
        return await in_thread(make, done.memory.engine, sources, engine)

    async def _handshake_all(
        self, peer: Peer, ticket: Ticket, shaken: _Round
    ) -> tuple[HandshakeDone, tuple[Source, ...]]:
        remote, done = await self._handshake(
            peer,
            shaken,
            hint=ticket.agent_boot,
            engine_id=ticket.engine_id,
            engine_instance=ticket.engine_instance,
            offer_id=ticket.offer_id,
            secret=ticket.secret or None,
        )
        check_compatible(done.memory.engine, shaken.engine.spec)
        home = await self._source(remote, done, shaken, ticket.engine_instance)
        self._peers.listen(peer, done.events_endpoint)
        return done, (
            home,
            *[await self._handshake_remote(other, done, shaken) for other in done.remote_ranks],
        )

    async def _handshake_remote(
        self, other: AgentRanks, home: HandshakeDone, shaken: _Round
    ) -> Source:
        """Shake hands with an agent that has ranks of the engine, but not its leases."""
        engine_id = home.memory.engine.engine_id
        peer = self._peers.acquire(PeerAddress(other.endpoint, other.server_key))
        try:
            remote, done = await self._handshake(
                peer, shaken, engine_id=engine_id, ranks=other.ranks, rank_secret=other.rank_secret
            )
            if done.memory.engine != home.memory.engine:
                raise GeometryError(
                    f"the agents of engine '{engine_id}' disagree about it",
                    code=ErrorCode.INCOMPATIBLE,
                    field="engine",
                )
            return await self._source(remote, done, shaken)
        except RequestRefused as error:  # the ticket does not name this agent
            message = f"the prefill agent at {peer.endpoint}: {error.message}"
            raise RemoteError(message, code=error.code, endpoint=peer.endpoint) from error
        finally:
            self._peers.release(peer)

    async def _handshake(
        self, peer: Peer, shaken: _Round, *, hint: str = "", **wanted: Any
    ) -> tuple[RemoteAgent, HandshakeDone]:
        """Shake hands. Raises `KVBusError`.

        If another process than ``hint`` refuses, another agent may have the address: its name is
        resolved again.
        """
        handshake = Handshake(
            min_protocol=PROTOCOL_VERSION,
            max_protocol=PROTOCOL_VERSION,
            agent_id=self._agent.identity.agent_id,
            reader=shaken.engine.spec,
            machine=shaken.machine,
            nixl_backends=self._agent.data.backends,
            **wanted,
        )
        client, loop, address = peer.client, self._agent.loop, peer.client.address

        async def shake_hands() -> tuple[RemoteAgent, HandshakeDone]:
            remote, timeout_s = peer.remote, max(1e-3, shaken.deadline - loop.time())
            done = await client.request(handshake, timeout_s=timeout_s)
            if remote.closed:  # meanwhile
                raise remote.loss()
            return self._peers.found(peer), done

        try:
            try:
                return await shake_hands()
            except PeerLost:  # the reply of a new process fails all requests to the previous one
                return await shake_hands()
        except RequestTimeout as error:
            raise _unreachable(client) from error
        except KVBusError as error:
            if not hint or client.peer_boot in (None, hint) or client.refusal:
                raise
            refused = error
        with anyio.move_on_after(shaken.deadline - loop.time()):
            if await client.has_moved(address):
                return await self._handshake(peer, shaken, hint=hint, **wanted)
        raise refused

    async def _source(
        self, remote: RemoteAgent, done: HandshakeDone, shaken: _Round, instance: str = ""
    ) -> Source:
        placed = await in_thread(placed_ranks, done.memory)  # takes ms per rank
        place, lent = (remote, done.memory_id), shaken.lent
        if place not in lent:
            within_s = shaken.deadline - self._agent.loop.time()
            lent[place] = await self.borrower.borrow(remote, done, shaken.engine, within_s=within_s)
        borrowed, memory, nixl_peer, remotes = lent[place], None, None, dict[int, Defined]()
        fault: Fault | None = None
        if done.nixl_metadata and not (shaken.machine and isinstance(borrowed, MappedMemory)):
            memory = NixlMemory.of(done)
            await self._agent.data_plane.open()
            nixl_peer = await remote.connect_nixl(memory)
            await self._agent.data_plane.end_if_exposed()
            remotes = add_remotes(self._agent.data, done.memory, memory.agent, nixl_peer.defined)
            fault = self._slot_fault(done, shaken.engine)
        return Source(
            remote=remote,
            engine_id=done.memory.engine.engine_id,
            engine_instance=instance,
            nixl=memory,
            memory_id=done.memory_id,
            rank_secret=done.rank_secret,
            slot_bytes=done.slot_bytes,
            ranks=placed,
            nixl_peer=nixl_peer,
            remotes=remotes,
            mapped=borrowed if isinstance(borrowed, MappedMemory) else None,
            unmapped=borrowed if isinstance(borrowed, str) else "",
            fault=fault,
        )

    def _slot_fault(self, done: HandshakeDone, engine: LocalEngine) -> Fault | None:
        agent = self._agent
        ours = agent.staging.kinds_of(engine.devices)
        if done.nixl_backend != UCX or not is_emulated(
            ours,
            done.slot_memory,
            on_one_machine=machine_id() == done.memory_socket.machine != "",
            has_rdma=has_rdma(agent.data_plane.interfaces),
        ):
            return None
        fault = emulation_fault(
            f"engine '{done.memory.engine.engine_id}' at {done.agent_id}", ours, done.slot_memory
        )
        if fault not in self._warned:
            if len(self._warned) >= MAX_ROUTES:
                self._warned.clear()
            self._warned.add(fault)
            log.warning("read.emulated", reader=engine.engine_id, reason=fault.what, do=fault.do)
        return fault

    def _keep(self, key: RouteKey, route: Route) -> None:
        if route.engine.lost:
            raise engine_lost()
        for source in route.sources:
            _check_open(source)
        here = ("", key.engine_instance)
        route.home.remote.remove(
            lambda one: one.engine_id == key.engine_id and one.engine_instance not in here
        )
        if (earlier := self._routes.get(key)) is not None:
            earlier.close()
        for source in route.sources:
            source.remote.sources[source] = route.close
        route.on_close = partial(self._routes.pop, key, None)
        self._routes[key], route.home.peer.refusal = route, ""
        route.used_at = now = self._agent.loop.time()
        by_age = sorted(self, key=lambda one: one.used_at)
        for index, one in enumerate(by_age):
            if one.used_at <= now - IDLE_ROUTE_S or len(by_age) - index > MAX_ROUTES:
                one.close()


def _check_open(source: Source) -> None:
    if source.remote.closed:
        raise source.remote.loss()
    if source.mapped is not None and source.mapped.closed:
        raise TransferFailed(f"the memory that was mapped is gone: {source.mapped.closed}")


def _can_be_read(sources: Iterable[Source]) -> bool:
    return all(one.is_mapped for one in sources) or all(one.nixl for one in sources)


def _unreachable(client: RequestClient) -> RemoteError:
    where, missing = client.endpoint, client.missing
    advice = (
        f"{missing}. Is it up, is its advertise_host an address that this machine reaches, is the "
        "port open on the way?"
        if missing
        else "there is a connection, but nothing comes by it. Is the agent stopped (kvbus status "
        f"{where}), or are packets of full size lost on the way (MTU)?"
    )
    return RemoteError(
        f"no prefill agent answers at {where}: {advice}",
        code=ErrorCode.PEER_UNREACHABLE,
        endpoint=where,
    )
