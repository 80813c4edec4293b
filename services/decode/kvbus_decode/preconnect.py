"""Connections and handshakes with the prefill agents of ``peers``, before the first fetch."""

from dataclasses import dataclass, field
from functools import partial
from itertools import product

import anyio
import structlog

from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.loop import guarded
from kvbus.agent.service import Agent
from kvbus.errors import ErrorCode, KVBusError, RemoteError
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.ticket import Ticket
from kvbus.protocol.tools import AgentStatus, PeerView, Status
from kvbus_decode.config import DecodeConfig
from kvbus_decode.peers import PeerDirectory
from kvbus_decode.remote_agent import Peer, PeerAddress
from kvbus_decode.route_book import RouteBook, RouteKey

log = structlog.get_logger()

AT_ONCE = 4
RETRY_S, MAX_RETRY_S = 15.0, 240.0
"""Interval of status requests; it doubles while there is a problem."""


@dataclass(slots=True, eq=False)
class _Listed:
    """Agent of `peers`; a held ``peer`` is not closed as idle."""

    address: PeerAddress
    peer: Peer | None = None
    news: anyio.Event = field(default_factory=anyio.Event)
    problem: str = ""
    unfit: set[RouteKey] = field(default_factory=set)


class PeerPreconnector:
    def __init__(
        self, agent: Agent, config: DecodeConfig, peers: PeerDirectory, routes: RouteBook
    ) -> None:
        self._agent, self._timeout_s = agent, config.request_timeout_s
        self._peers, self._routes = peers, routes
        listed = (text.partition(" ") for text in config.peers)
        self._listed = [_Listed(PeerAddress(endpoint, key)) for endpoint, _, key in listed]
        self._turns = anyio.CapacityLimiter(AT_ONCE)

    @property
    def num_listed(self) -> int:
        return len(self._listed)

    @property
    def num_connected(self) -> int:
        return sum(map(self._is_connected, self._listed))

    def view(self, endpoint: str) -> PeerView:
        for one in self._listed:
            if endpoint in (one.address.endpoint, one.peer.endpoint if one.peer else ""):
                return PeerView(listed=True, connected=self._is_connected(one), problem=one.problem)
        return PeerView()

    def start(self) -> None:
        for one in self._listed:
            self._agent.tasks.start_soon(self._keep_connected, one)

    def see_engine(self) -> None:
        for one in self._listed:
            one.news.set()

    def see_news(self, peer: Peer, is_new: bool) -> None:
        for one in self._listed:
            if one.peer is peer and (is_new or one.problem):
                one.news.set()

    def _is_connected(self, one: _Listed) -> bool:
        return one.peer is not None and self._routes.num_from(one.peer.endpoint) > 0

    async def _keep_connected(self, one: _Listed) -> None:
        pause_s = RETRY_S
        while True:
            one.news = anyio.Event()
            async with self._turns:
                await guarded(partial(self._connect, one), partial(self._note_problem, one))
            with anyio.move_on_after(pause_s):
                await one.news.wait()
            pause_s = min(2 * pause_s, MAX_RETRY_S) if one.problem else RETRY_S

    async def _connect(self, one: _Listed) -> None:
        began, num_routes = self._agent.loop.time(), 0
        peer = one.peer
        if peer is None or not self._peers.has(peer):
            peer = self._hold(one, one.address)
        status = await peer.client.request(Status(), timeout_s=self._timeout_s)
        if status.role is not AgentRole.PREFILL:
            raise RemoteError(
                f"the agent at {peer.endpoint} is a {status.role} agent: `peers` are prefill "
                "agents",
                code=ErrorCode.CONFIG,
                endpoint=peer.endpoint,
            )
        pairs = self._pairs(peer, status)
        named = one.address._replace(endpoint=status.peer_endpoint or peer.endpoint)
        if named != peer.address:  # tickets name this endpoint
            peer = self._hold(one, named)
        self._peers.listen(peer, status.events_endpoint)
        one.unfit &= pairs.keys()
        for key, (ticket, engine) in pairs.items():
            if key in one.unfit or self._routes.find(ticket, engine) is not None:
                continue
            try:
                await self._routes.route(peer, ticket, engine, timeout_s=self._timeout_s)
            except KVBusError as error:
                if error.code is not ErrorCode.INCOMPATIBLE:
                    raise
                one.unfit.add(key)
            else:
                num_routes += 1
                pair = {"engine_id": ticket.engine_id, "reader": engine.engine_id}
                log.info("route.connected", peer=peer.endpoint, **pair)
        one.problem = ""
        if num_routes:
            seconds = round(self._agent.loop.time() - began, 3)
            endpoint = one.address.endpoint
            log.info("peer.connected", peer=endpoint, num_routes=num_routes, seconds=seconds)

    def _hold(self, one: _Listed, address: PeerAddress) -> Peer:
        before, one.peer = one.peer, None
        if before is not None:
            self._peers.release(before)
        one.peer = self._peers.acquire(address)
        return one.peer

    def _pairs(self, peer: Peer, status: AgentStatus) -> dict[RouteKey, tuple[Ticket, LocalEngine]]:
        tickets = [
            Ticket(
                agent_id=status.agent_id,
                agent_boot=peer.client.peer_boot or "",
                endpoint=status.peer_endpoint or peer.endpoint,
                engine_id=engine_id,
                engine_instance=instance,
                offer_id="",
                request_id="",
                num_tokens=0,
                secret="",
                server_key=peer.address.server_key,
            )
            for engine_id, instance in _instances(status).items()
        ]
        engines = [engine for engine in self._agent.engines.engines.values() if engine.ready]
        pairs = product(tickets, engines)
        return {RouteKey.of(ticket, engine): (ticket, engine) for ticket, engine in pairs}

    def _note_problem(self, one: _Listed, error: KVBusError) -> None:
        if one.problem != error.message:
            endpoint = one.address.endpoint
            log.warning("peer.cold", peer=endpoint, code=error.code, reason=error.message)
        one.problem = error.message


def _instances(status: AgentStatus) -> dict[str, str]:
    """Return instances of engines, and of pools, by the id that readers use."""
    ready = {
        engine_id: status.engine_instances[engine_id]
        for engine_id, is_ready in status.engines.items()
        if is_ready and engine_id in status.engine_instances
    }
    return ready | {name: pool.engine_instance for name, pool in status.pools.items()}
