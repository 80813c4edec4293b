"""Keeps the prefill agents that are listed warm: connected, hands shaken, the first READ done.

    look ─▶ listed ─▶ one task each:  status ─▶ routes that are not known ─▶ handshake ─▶ first READ
                            ▲                                                                │
                            └──── after a while, an engine came, another process is there ◀──┘

Refuses to be in the way: few at a time, ever more slowly where it fails, which is said once.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet

import anyio
import structlog

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.process.guard import guarded
from kvbus.agent.process.service import Agent
from kvbus.errors import ErrorCode, KVBusError, RemoteError
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.peer import AgentStatus, Status
from kvbus.protocol.peer_view import PeerView
from kvbus.protocol.ticket import Ticket
from kvbus_decode.config import DecodeConfig
from kvbus_decode.peer.directory import Peer, PeerAddress, PeerDirectory
from kvbus_decode.peer.first_read import FirstReader
from kvbus_decode.peer.handshake import RouteBook
from kvbus_decode.peer.listed import ListedPeers
from kvbus_decode.peer.route import Route

log = structlog.get_logger()

AT_ONCE = 4
RETRY_S, MAX_RETRY_S = 1.0, 300.0


@dataclass(slots=True, eq=False)
class _Listed:
    """One agent that is listed, and what is known of it."""

    address: PeerAddress
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    news: anyio.Event = field(default_factory=anyio.Event)
    peer: Peer | None = None
    """Held, so that it is not left for being idle."""
    unfit: set[tuple[str, str, str]] = field(default_factory=set)
    """Engines of theirs and ours that are not of the same model."""
    is_warm: bool = False
    told: str = ""
    """What keeps it cold."""
    named: str = ""
    """Where its tickets said that it is."""

    @property
    def endpoints(self) -> tuple[str, str]:
        """As it is listed, and as its tickets have it."""
        return self.address.endpoint, self.named


class WarmPeers:
    """All that are listed; ``prepare`` is awaited with each new route."""

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        peers: PeerDirectory,
        routes: RouteBook,
        prepare: Callable[[Route], Awaitable[None]],
    ) -> None:
        self._agent, self._config = agent, config
        self._peers, self._routes, self._prepare = peers, routes, prepare
        self._list, self._reader = ListedPeers(config), FirstReader(agent)
        self._listed: dict[PeerAddress, _Listed] = {}
        self._turns = anyio.Semaphore(AT_ONCE)
        self._ready: WeakSet[Route] = WeakSet()

    @property
    def num_listed(self) -> int:
        """Agents that are listed."""
        return len(self._listed)

    @property
    def num_warm(self) -> int:
        """Those of them from which the first fetch costs what the next one does."""
        return sum(one.is_warm for one in self._listed.values())

    def view(self, endpoint: str) -> PeerView:
        """Whether the agent there is listed and warm, and what keeps it cold."""
        one = next((one for one in self._listed.values() if endpoint in one.endpoints), None)
        if one is None:
            return PeerView()
        return PeerView(listed=True, warm=one.is_warm, problem=one.told)

    def start(self) -> None:
        """Begin, if the configuration lists some."""
        if self._list.any:
            self._agent.tasks.start_soon(self._look)

    def see_engine(self) -> None:
        """An engine of ours is ready."""
        for one in self._listed.values():
            one.news.set()

    def see_peer(self, peer: Peer) -> None:
        """An engine of a peer is ready, or its process is another one."""
        for one in self._listed.values():
            if one.peer is peer:
                one.news.set()

    async def _look(self) -> None:
        while True:
            listed = await self._list.look()
            for address in self._listed.keys() - listed:
                self._listed.pop(address).scope.cancel()
            for address in listed - self._listed.keys():
                self._listed[address] = one = _Listed(address)
                self._agent.tasks.start_soon(self._keep, one)
            await anyio.sleep(self._config.peers_refresh_s)

    async def _keep(self, one: _Listed) -> None:
        retry_s = RETRY_S
        with one.scope:
            try:
                while True:
                    one.news = anyio.Event()
                    async with self._turns:
                        await guarded(partial(self._warm, one), partial(self._note_cold, one))
                    if one.told:
                        pause_s, retry_s = retry_s, min(2 * retry_s, MAX_RETRY_S)
                    else:
                        pause_s, retry_s = self._config.peers_refresh_s, RETRY_S
                    with anyio.move_on_after(pause_s):
                        await one.news.wait()
            finally:
                self._let_go(one)

    async def _warm(self, one: _Listed) -> None:
        """All that is not warm yet; raises `KVBusError` with the first thing that was refused."""
        began = self._agent.loop.time()
        peer, status = await self._meet(one)
        tickets = [
            _ahead(peer, status, engine_id)
            for engine_id, is_ready in status.engines.items()
            if is_ready and engine_id in status.engine_instances
        ]
        engines = [one for one in self._agent.engines.engines.values() if one.ready]
        pairs = {
            (ticket.agent_boot, ticket.engine_instance, engine.memory_id): (ticket, engine)
            for ticket in tickets
            for engine in engines
        }
        one.unfit &= pairs.keys()
        routes, refusal = [], None
        for key, (ticket, engine) in pairs.items():
            if key in one.unfit:
                continue
            try:
                routes.append(await self._warm_route(peer, ticket, engine))
            except KVBusError as error:
                if error.code is ErrorCode.INCOMPATIBLE:  # of another model: nothing to warm
                    one.unfit.add(key)
                elif error.code is ErrorCode.FORBIDDEN:
                    refusal = refusal or error
                else:
                    raise
        if refusal is not None:
            raise refusal
        self._note_warm(one, len(routes), self._agent.loop.time() - began)

    async def _meet(self, one: _Listed) -> tuple[Peer, AgentStatus]:
        """Its status, asked where its tickets will say that it is; raises `KVBusError`."""
        peer = self._hold(one, one.peer.address if one.peer else one.address)
        status = await _status(peer, self._config.request_timeout_s)
        one.named = status.peer_endpoint or peer.endpoint
        named = one.address._replace(endpoint=one.named)
        if named != peer.address:
            peer = self._hold(one, named)
            status = await _status(peer, self._config.request_timeout_s)
        self._peers.listen(peer, status.events_endpoint)
        return peer, status

    def _hold(self, one: _Listed, address: PeerAddress) -> Peer:
        if one.peer is not None and self._peers.find(address) is one.peer:
            return one.peer
        self._let_go(one)
        one.peer = self._peers.acquire(address)
        return one.peer

    def _let_go(self, one: _Listed) -> None:
        if one.peer is not None:
            self._peers.release(one.peer)
        one.peer, one.is_warm = None, False

    async def _warm_route(self, peer: Peer, ticket: Ticket, engine: LocalEngine) -> Route:
        timeout_s = self._config.request_timeout_s
        route = await self._routes.route(peer, ticket, engine, timeout_s=timeout_s)
        if route not in self._ready:
            await self._prepare(route)
            num_read = 0
            if not route.is_mapped:
                num_read = await self._read_first(route, ticket.agent_boot, timeout_s)
            self._ready.add(route)
            log.info(
                "route.warmed",
                peer=peer.endpoint,
                engine_id=ticket.engine_id,
                reader=engine.engine_id,
                num_first_reads=num_read,
            )
        return route

    async def _read_first(self, route: Route, agent_boot: str, timeout_s: float) -> int:
        """As `FirstReader.read`; a connection that UCX has given up is made anew by the next."""
        try:
            return await self._reader.read(route, timeout_s=timeout_s)
        except KVBusError as error:
            if error.code is ErrorCode.PEER_LOST:
                self._routes.forget_connection(agent_boot)
            raise

    def _note_warm(self, one: _Listed, num_routes: int, seconds: float) -> None:
        is_warm = num_routes > 0
        if is_warm and not one.is_warm:
            log.info(
                "peer.warmed",
                peer=one.address.endpoint,
                num_routes=num_routes,
                seconds=round(seconds, 3),
            )
        one.is_warm, one.told = is_warm, ""

    def _note_cold(self, one: _Listed, error: KVBusError) -> None:
        """Said once. Its name may lead elsewhere by now, so it may be left."""
        self._let_go(one)
        if one.told != error.message:
            log.warning(
                "peer.cold", peer=one.address.endpoint, code=error.code, reason=error.message
            )
        one.told = error.message


async def _status(peer: Peer, timeout_s: float) -> AgentStatus:
    """Raises `KVBusError`. No answer is not remembered of the peer: nobody has read from it."""
    status = await peer.client.ask(Status(), timeout_s=timeout_s)
    if status.role is not AgentRole.PREFILL:
        problem = f"is a {status.role} agent: `peers` are prefill agents"
    elif not status.events_endpoint:
        problem = "is of an earlier version, which cannot be warmed"
    else:
        return status
    message = f"the agent at {peer.endpoint} {problem}"
    raise RemoteError(message, code=ErrorCode.CONFIG, endpoint=peer.endpoint)


def _ahead(peer: Peer, status: AgentStatus, engine_id: str) -> Ticket:
    """What tickets of an engine will say of it; there is no offer, and no secret."""
    return Ticket(
        agent_id=status.agent_id,
        agent_boot=peer.client.peer_boot or "",
        endpoint=peer.endpoint,
        engine_id=engine_id,
        engine_instance=status.engine_instances[engine_id],
        offer_id="",
        request_id="",
        num_tokens=0,
        secret="",
        server_key=peer.address.server_key,
    )
