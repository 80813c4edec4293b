"""Meets the prefill agents of ``peers`` before the first fetch from them: connected, hands shaken.

a round ─▶ names are looked up ─▶ each agent: status ─▶ a handshake for each pair of engines
   ▲                                                          that have not met
   └── after `peers_refresh_s`, or when an engine came, or another process is there
"""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

import anyio
import structlog

from kvbus.agent.engines import LocalEngine
from kvbus.agent.loop import guarded
from kvbus.agent.service import Agent
from kvbus.bus import look_up_all
from kvbus.errors import ErrorCode, KVBusError, RemoteError
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.status import AgentStatus, PeerView, Status
from kvbus.protocol.ticket import Ticket
from kvbus_decode.config import DecodeConfig
from kvbus_decode.peer.directory import Peer, PeerAddress, PeerDirectory
from kvbus_decode.peer.handshake import RouteBook
from kvbus_decode.peer.route import Route

log = structlog.get_logger()

AT_ONCE = 4
LOOK_UP_WITHIN_S = 5.0

Pair = tuple[str, str, str]
"""The process of the agent, its engine's, and the memory of ours."""


class _Listing(NamedTuple):
    """An entry of `peers`."""

    host: str
    port: str
    key: str

    @classmethod
    def of(cls, text: str) -> "_Listing":
        endpoint, _, key = text.partition(" ")
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return cls(host, port, key)


@dataclass(slots=True, eq=False)
class _Listed:
    """An agent of `peers`; ``peer`` is held, so that it is not left for being idle.

    ``named`` is where its tickets say that it is, ``unfit`` are pairs of engines of other models,
    ``problem`` is what keeps it cold.
    """

    address: PeerAddress
    peer: Peer | None = None
    named: str = ""
    unfit: set[Pair] = field(default_factory=set)
    is_warm: bool = False
    problem: str = ""


class WarmPeers:
    """All agents that are listed."""

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        peers: PeerDirectory,
        routes: RouteBook,
    ) -> None:
        self._agent, self._config = agent, config
        self._peers, self._routes = peers, routes
        self._listings = [_Listing.of(text) for text in config.peers]
        self._listed: dict[PeerAddress, _Listed] = {}
        self._addresses: dict[str, list[str]] = {one.host: [] for one in self._listings}
        self._problems: dict[str, str] = {}
        self._news = anyio.Event()
        self._turns = anyio.CapacityLimiter(AT_ONCE)
        self._lookups = anyio.CapacityLimiter(AT_ONCE)
        self._warmed: WeakSet[Route] = WeakSet()

    @property
    def num_listed(self) -> int:
        """Agents that are listed."""
        return len(self._listed)

    @property
    def num_warm(self) -> int:
        """Those of them that a first fetch finds met."""
        return sum(one.is_warm for one in self._listed.values())

    def view(self, endpoint: str) -> PeerView:
        """Whether the agent there is listed and warm, and what keeps it cold."""
        for one in self._listed.values():
            if endpoint in (one.address.endpoint, one.named):
                return PeerView(listed=True, warm=one.is_warm, problem=one.problem)
        return PeerView()

    def start(self) -> None:
        """Begin, if the configuration lists some."""
        if self._listings:
            self._agent.tasks.start_soon(self._run)

    def see_engine(self) -> None:
        """An engine of ours is ready."""
        self._news.set()

    def see_peer(self, peer: Peer) -> None:
        """An engine of a peer is ready, or its process is another one."""
        if any(one.peer is peer for one in self._listed.values()):
            self._news.set()

    async def _run(self) -> None:
        while True:
            self._news = anyio.Event()
            await self._look_up()
            async with anyio.create_task_group() as tasks:
                for one in self._listed.values():
                    tasks.start_soon(self._meet_in_turn, one)
            with anyio.move_on_after(self._config.peers_refresh_s):
                await self._news.wait()

    async def _look_up(self) -> None:
        """All agents that are listed now; a name without an answer keeps the addresses it had."""
        async with anyio.create_task_group() as tasks:
            for host in self._addresses:
                tasks.start_soon(self._look_up_one, host)
        found = [
            PeerAddress(f"tcp://{address}:{one.port}", one.key)
            for one in self._listings
            for address in self._addresses[one.host]
        ]
        most = self._config.max_peers
        crowded = f"{len(found)} agents are listed, {most} are the most (max_peers)"
        self._tell("max_peers", crowded if len(found) > most else "")
        for address in self._listed.keys() - found[:most]:
            self._let_go(self._listed.pop(address))
        for address in found[:most]:
            self._listed.setdefault(address, _Listed(address))

    async def _look_up_one(self, host: str) -> None:
        try:
            with anyio.fail_after(LOOK_UP_WITHIN_S):
                found = await anyio.to_thread.run_sync(
                    look_up_all, host, abandon_on_cancel=True, limiter=self._lookups
                )
            self._addresses[host] = sorted(found)  # name servers tell them in turns
            self._tell(host, "")
        except TimeoutError:
            self._tell(host, f"the name server says nothing within {LOOK_UP_WITHIN_S:g} s")
        except (OSError, UnicodeError) as error:
            self._tell(host, getattr(error, "strerror", None) or "it is not a host name")

    def _tell(self, what: str, problem: str) -> None:
        """Log a problem once, until it is another one."""
        if problem and self._problems.get(what) != problem:
            log.warning("peers.unknown", listed=what, reason=problem)
        self._problems[what] = problem

    async def _meet_in_turn(self, one: _Listed) -> None:
        async with self._turns:
            await guarded(partial(self._meet, one), partial(self._note_cold, one))

    async def _meet(self, one: _Listed) -> None:
        """Shake hands for each pair of engines; raises `KVBusError` with the first refusal."""
        began = self._agent.loop.time()
        peer, status = await self._find(one)
        routes, refusal, pairs = [], None, self._pairs(peer, status)
        one.unfit &= pairs.keys()
        for key in pairs.keys() - one.unfit:
            try:
                routes.append(await self._route(peer, *pairs[key]))
            except KVBusError as error:
                if error.code is ErrorCode.INCOMPATIBLE:  # of another model: they never meet
                    one.unfit.add(key)
                elif error.code is ErrorCode.FORBIDDEN:
                    refusal = refusal or error
                else:
                    raise
        if refusal is not None:
            raise refusal
        if routes and not one.is_warm:
            seconds = round(self._agent.loop.time() - began, 3)
            endpoint = one.address.endpoint
            log.info("peer.warmed", peer=endpoint, num_routes=len(routes), seconds=seconds)
        one.is_warm, one.problem = bool(routes), ""

    async def _find(self, one: _Listed) -> tuple[Peer, AgentStatus]:
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

    def _pairs(self, peer: Peer, status: AgentStatus) -> dict[Pair, tuple[Ticket, LocalEngine]]:
        engines = [one for one in self._agent.engines.engines.values() if one.ready]
        tickets = [
            _ahead(peer, status, engine_id)
            for engine_id, is_ready in status.engines.items()
            if is_ready and engine_id in status.engine_instances
        ]
        return {
            (ticket.agent_boot, ticket.engine_instance, engine.memory_id): (ticket, engine)
            for ticket in tickets
            for engine in engines
        }

    async def _route(self, peer: Peer, ticket: Ticket, engine: LocalEngine) -> Route:
        timeout_s = self._config.request_timeout_s
        route = await self._routes.route(peer, ticket, engine, timeout_s=timeout_s)
        if route not in self._warmed:
            self._warmed.add(route)
            met = {"engine_id": ticket.engine_id, "reader": engine.engine_id}
            log.info("route.warmed", peer=peer.endpoint, **met)
        return route

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

    def _note_cold(self, one: _Listed, error: KVBusError) -> None:
        """Said once. Its name may lead elsewhere by now, so it may be left."""
        self._let_go(one)
        if one.problem != error.message:
            endpoint = one.address.endpoint
            log.warning("peer.cold", peer=endpoint, code=error.code, reason=error.message)
        one.problem = error.message


async def _status(peer: Peer, timeout_s: float) -> AgentStatus:
    """Raises `KVBusError`, also for what is no prefill agent."""
    status = await peer.client.ask(Status(), timeout_s=timeout_s)
    if status.role is AgentRole.PREFILL:
        return status
    raise RemoteError(
        f"the agent at {peer.endpoint} is a {status.role} agent: `peers` are prefill agents",
        code=ErrorCode.CONFIG,
        endpoint=peer.endpoint,
    )


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
