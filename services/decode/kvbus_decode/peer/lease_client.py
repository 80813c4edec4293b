"""Asks the prefill agent for what the fetch table wants: a route, a lease, more time, a yes.

Every answer goes back to the table as an event, exactly one for each command.
"""

import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from kvbus.agent.process.guard import guarded
from kvbus.agent.process.service import Agent
from kvbus.bus import EventListener
from kvbus.errors import ErrorCode, KVBusError, RequestTimeout
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import Empty
from kvbus.protocol.peer import Claim, Confirm, Granted, PeerWithdraw, Release, Renew, Take
from kvbus.protocol.ticket import Ticket
from kvbus_decode.active import ActiveFetch
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch import events as ev
from kvbus_decode.peer.directory import ENGINE_READY, Peer, PeerAddress, PeerDirectory
from kvbus_decode.peer.draining import Draining
from kvbus_decode.peer.handshake import RouteBook
from kvbus_decode.peer.memory_check import check_memory
from kvbus_decode.peer.route import Route

log = structlog.get_logger()

RELEASE_TIMEOUT_S = 5.0
WITHOUT_FAULT = (ErrorCode.CANCELLED, ErrorCode.TIMEOUT, ErrorCode.BUSY)


def luck() -> float:
    """From 0 to 1, for pauses."""
    return random.random()  # noqa: S311 - no secret


class LeaseClient(EventListener):
    """Requests to prefill agents for the fetches under way; ``dispatch`` takes the answers.

    ``prepare`` is awaited with a new route before the first claim on it.
    """

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        dispatch: Callable[[ev.Event], None],
        prepare: Callable[[Route, ev.Requested], Awaitable[None]],
    ) -> None:
        self._agent, self._config, self._dispatch = agent, config, dispatch
        self._prepare = prepare
        self.active: dict[str, ActiveFetch] = {}
        """The fetches that are under way, by id."""
        self._by_offer: defaultdict[str, set[str]] = defaultdict(set)
        self.peers = PeerDirectory(
            agent,
            config,
            on_boot=self._see_boot,
            on_gone=self._lose_peer,
            on_dropped=self._drop_peer,
            listener=self,
        )
        self.routes = RouteBook(agent, config, self.peers)
        self.on_news: Callable[[Peer], object] = _ignore
        """Told of a peer that is another process, or has a new engine."""
        self._draining = Draining(agent, lambda fetch_id: fetch_id not in self.active)

    def end(self, fetch_id: str) -> None:
        """Nothing more will be asked for this fetch."""
        fetch = self.active.pop(fetch_id, None)
        if fetch is None:
            return
        offer_id = fetch.requested.ticket.offer_id
        self._by_offer[offer_id].discard(fetch_id)
        if not self._by_offer[offer_id]:
            del self._by_offer[offer_id]
        for peer in fetch.peers:
            self.peers.release(peer)

    def drain(self, fetch_id: str) -> None:
        """It has failed, and something may still land: have its sources serve that."""
        if (fetch := self.active.get(fetch_id)) is not None:
            self._draining.begin(fetch)

    def resolve(self, command: ev.ResolvePeer) -> None:
        """Find the route, by a handshake."""
        try:
            fetch = self.begin(command.requested)
        except KVBusError as error:
            self._dispatch(ev.StepFailed(command.fetch_id, error))
        else:
            self._agent.tasks.start_soon(self._resolve, fetch, command.timeout_s)

    def hold_peer(self, command: ev.HoldPeer) -> None:
        """Keep the peers of a fetch that asks for nothing yet."""
        self._begin_on_route(command.requested)

    def claim(self, command: ev.SendClaim) -> None:
        """Ask for the lease; for a fetch that had not to wait this is the first step."""
        fetch_id, requested = command.fetch_id, command.requested
        ticket, sent_at = requested.ticket, self._agent.loop.time()
        fetch = self._begin_on_route(requested)
        if fetch is None:
            return
        if fetch.route is not None and fetch.route.others:
            self._hold_progress(fetch, fetch.route, command.timeout_s)
        message = Claim(
            agent_boot=ticket.agent_boot,
            offer_id=ticket.offer_id,
            reader_id=self._reader_id(fetch_id),
            lease_s=self._config.lease_s,
            secret=ticket.secret,
            reader_agent=self._agent.identity.agent_id,
            reader_boot=self._agent.identity.boot,
        )
        on_reply = partial(self._on_granted, fetch_id, sent_at, ticket)
        fetch.home.ask(message, command.timeout_s, on_reply)

    def renew(self, command: ev.SendRenew) -> None:
        """Ask for a longer lease, and for what is new."""
        fetch, sent_at = self.active[command.fetch_id], self._agent.loop.time()
        if fetch.route is not None and fetch.route.others:
            self._hold_progress(fetch, fetch.route, command.timeout_s)
        ticket = fetch.requested.ticket
        message = Renew(
            agent_boot=ticket.agent_boot,
            offer_id=ticket.offer_id,
            epoch=command.epoch,
            token=command.token,
            lease_s=self._config.lease_s,
            known_blocks=dict(command.known_blocks),
        )
        on_reply = partial(self._on_granted, command.fetch_id, sent_at, None)
        fetch.home.ask(message, command.timeout_s, on_reply)

    def confirm(self, command: ev.SendConfirm, *, others_have: bool = False) -> None:
        """Ask whether what was read is valid: the agents without the lease first, then its home."""
        fetch = self.active.get(command.fetch_id)
        if fetch is None:  # it ended while the others were asked
            return
        ticket, route = fetch.requested.ticket, fetch.route
        if route is None or not route.others or others_have:
            message = Confirm(
                agent_boot=ticket.agent_boot,
                offer_id=ticket.offer_id,
                epoch=command.epoch,
                token=command.token,
            )
            on_reply = partial(self._on_confirmed, command.fetch_id)
            fetch.home.ask(message, command.timeout_s, on_reply)
            return

        def on_checked(error: KVBusError | None) -> None:
            if error is None and self._agent.loop.time() < fetch.deadline:
                self.confirm(command, others_have=True)
                return
            self.routes.forget(route)
            late = RequestTimeout("the other agents of the engine answered after the deadline")
            self._dispatch(ev.StepFailed(command.fetch_id, error or late))

        timeout_s, offer_id = command.timeout_s, ticket.offer_id
        check_memory(route, route.others, offer_id, timeout_s=timeout_s, on_end=on_checked)

    def take(self, command: ev.SendTake) -> None:
        """Ask whether what was read without a lease is valid; the answer ends the offer."""
        fetch_id, known = command.fetch_id, self.active.get(command.fetch_id)
        fetch = self._begin_on_route(known.requested) if known is not None else None
        if fetch is None:  # the table is about to hear why
            return
        ticket = fetch.requested.ticket
        message = Take(
            agent_boot=ticket.agent_boot,
            offer_id=ticket.offer_id,
            reader_id=self._reader_id(fetch_id),
            secret=ticket.secret,
            token=fetch.take_token,
            tables=dict(command.tables),
            reader_agent=self._agent.identity.agent_id,
            reader_boot=self._agent.identity.boot,
        )
        fetch.home.ask(message, command.timeout_s, partial(self._on_confirmed, fetch_id))

    def release(self, command: ev.SendRelease) -> None:
        """Return a lease; when that fails, it ends by itself.

        The route may be why the fetch failed: a rank at another agent may have come back, or the
        connection is broken, which all routes to that agent share.
        """
        if command.code is not ErrorCode.CANCELLED:
            self.routes.forget_multi_agent(command.ticket)
        if command.code is ErrorCode.PEER_LOST:
            self.routes.forget_connection(command.ticket.agent_boot)
        peer = self.peers.find(PeerAddress.of(command.ticket))
        if peer is None:
            return
        message = Release(
            agent_boot=command.ticket.agent_boot,
            offer_id=command.ticket.offer_id,
            epoch=command.epoch,
            token=command.token,
            code=command.code.value,
        )
        peer.ask(message, RELEASE_TIMEOUT_S, lambda _: None)

    def withdraw(self, command: ev.SendWithdraw) -> None:
        """End an offer; when that fails, it ends by itself."""
        ticket = command.ticket
        try:
            peer = self.peers.acquire(PeerAddress.of(ticket))
        except KVBusError as error:
            log.info("offer.kept", offer_id=ticket.offer_id, reason=error.message)
            return
        message = PeerWithdraw(
            agent_boot=ticket.agent_boot, offer_id=ticket.offer_id, secret=ticket.secret
        )
        peer.ask(message, RELEASE_TIMEOUT_S, lambda _: self.peers.release(peer))

    def on_event(self, endpoint: str, event: Notice) -> None:
        """An offer or lease changed: its fetches ask what is true."""
        if event.op == ENGINE_READY and (peer := self.peers.of_events(endpoint)) is not None:
            self.on_news(peer)
        offer_id = event.body.get("offer_id")
        known = self._by_offer.get(offer_id, ()) if isinstance(offer_id, str) else ()
        for fetch_id in list(known):
            self._dispatch(ev.OfferAdvanced(fetch_id))

    def on_heartbeat(self, endpoint: str, boot: str, reads: int) -> None:
        """A peer lives; what is not ours of its reads is by other agents."""
        peer = self.peers.of_events(endpoint)
        if peer is not None:
            peer.client.note_alive(boot)
            ours = sum(one.home is peer for one in self.active.values() if one.peers)
            peer.num_reads_elsewhere = max(0, reads - ours)

    def on_gap(self, endpoint: str, boot: str, topic: str) -> None:
        """Something of this agent was missed: all of its fetches ask."""
        for fetch_id, fetch in list(self.active.items()):
            if fetch.requested.ticket.agent_boot == boot:
                self._dispatch(ev.OfferAdvanced(fetch_id))

    def on_silence(self, endpoint: str, boot: str | None) -> None:
        """Said in the log only: deadlines and leases decide."""
        log.warning("peer.silent", endpoint=endpoint, peer_boot=boot)

    def on_alive(self, endpoint: str, boot: str) -> None:
        """The agent is back; what it said meanwhile was missed."""
        log.info("peer.alive", endpoint=endpoint, peer_boot=boot)
        self.on_gap(endpoint, boot, "")

    def begin(self, requested: ev.Requested) -> ActiveFetch:
        """The fetch is under way, so its engine will be told; hold its home.

        Raises `LocalError`, and `PeerLost` when that is gone. What was not held is held by the next
        call.
        """
        fetch = self.active.get(requested.fetch_id)
        if fetch is None:
            engine = self._agent.engines.engine(requested.engine_id)
            fetch = ActiveFetch(requested, engine, self._agent.loop.time() + requested.timeout_s)
            for other in self.active.values() if len(self.active) == 1 else ():
                other.was_alone = False  # of more, all are marked already
            fetch.was_alone = not self.active
            self.active[fetch.fetch_id] = fetch
            self._by_offer[requested.ticket.offer_id].add(fetch.fetch_id)
        elif fetch.requested.ticket is not requested.ticket:
            self._replace_ticket(fetch, requested)
        if not fetch.peers:
            fetch.peers.append(self.peers.acquire(PeerAddress.of(requested.ticket)))
        fetch.home.check_alive(requested.ticket.agent_boot)
        return fetch

    def _replace_ticket(self, fetch: ActiveFetch, requested: ev.Requested) -> None:
        """The fetch was for an offer that had not been made; the agent names where it is."""
        self._forget_offer(fetch)
        fetch.requested = requested
        self._by_offer[requested.ticket.offer_id].add(fetch.fetch_id)
        if fetch.peers and fetch.home.address != PeerAddress.of(requested.ticket):
            self.peers.release(fetch.peers.pop())

    def _forget_offer(self, fetch: ActiveFetch) -> None:
        """No events of its offer are for it any more."""
        offer_id = fetch.requested.ticket.offer_id
        self._by_offer[offer_id].discard(fetch.fetch_id)
        if not self._by_offer[offer_id]:
            del self._by_offer[offer_id]

    def _begin_on_route(self, requested: ev.Requested) -> ActiveFetch | None:
        """The fetch, whose route is known, is under way; None when it cannot be."""
        try:
            fetch = self.begin(requested)
            if fetch.route is None:
                self._hold_route(fetch, requested.route)
        except KVBusError as error:
            self._dispatch(ev.StepFailed(requested.fetch_id, error))
            return None
        return fetch

    def _reader_id(self, fetch_id: str) -> str:
        return f"{self._agent.identity.boot}/{fetch_id}"

    async def _resolve(self, fetch: ActiveFetch, timeout_s: float) -> None:
        async def find_route() -> None:
            ticket, engine = fetch.requested.ticket, fetch.engine
            route = await self.routes.route(fetch.home, ticket, engine, timeout_s=timeout_s)
            await self._prepare(route, fetch.requested)
            if self.active.get(fetch.fetch_id) is fetch:  # else it has ended meanwhile
                self._hold_route(fetch, route)
                self._dispatch(ev.PeerReady(fetch.fetch_id))

        def fail(error: KVBusError) -> None:
            self._dispatch(ev.StepFailed(fetch.fetch_id, error))

        await guarded(find_route, fail)

    def _hold_route(self, fetch: ActiveFetch, route: object) -> None:
        """Hold every peer of the route."""
        if isinstance(route, Route):
            num_held = len(fetch.peers) - 1
            for source in route.others[num_held:]:
                fetch.peers.append(self.peers.acquire(source.peer.address))
            fetch.route, fetch.replica_index = route, route.next_replica_index()

    def _hold_progress(self, fetch: ActiveFetch, route: Route, timeout_s: float) -> None:
        """Tell the agents without the lease that they are read as long as it lasts."""

        def on_checked(error: KVBusError | None) -> None:
            if error is not None and error.code not in WITHOUT_FAULT:
                self.routes.forget(route)
                self._dispatch(ev.StepFailed(fetch.fetch_id, error))

        offer_id, lease_s = fetch.requested.ticket.offer_id, self._config.lease_s
        check_memory(
            route,
            route.others,
            offer_id,
            timeout_s=timeout_s,
            on_end=on_checked,
            progress_s=lease_s,
        )

    def _on_granted(
        self, fetch_id: str, sent_at: float, claimed: Ticket | None, reply: Granted | KVBusError
    ) -> None:
        if isinstance(reply, Granted):
            self._dispatch(ev.LeaseGranted(fetch_id, sent_at, reply, claimed))
        elif claimed is not None:
            self._dispatch(ev.StepFailed(fetch_id, reply, luck()))
        else:
            self._dispatch(ev.RenewFailed(fetch_id, reply, luck()))

    def _on_confirmed(self, fetch_id: str, reply: Empty | KVBusError) -> None:
        if isinstance(reply, KVBusError):
            self._dispatch(ev.StepFailed(fetch_id, reply, luck()))
        else:
            self._dispatch(ev.LeaseConfirmed(fetch_id))

    def _drop_peer(self, peer: Peer) -> None:
        self.routes.forget_peer(peer)

    def _lose_peer(self, peer: Peer, boot: str) -> None:
        """Its process is gone, and what was read from it; a replaced one had nothing left.

        The next one may be there already, and a fetch of an offer of its own goes on.
        """
        lost = [
            fetch.fetch_id
            for fetch in self.active.values()
            if peer in fetch.peers and not (fetch.home is peer and fetch.is_of_another(boot))
        ]
        level = log.warning if lost else log.info
        level("peer.lost", peer=peer.endpoint, peer_boot=boot, num_fetches=len(lost))
        for fetch_id in lost:
            self._dispatch(ev.StepFailed(fetch_id, peer.loss()))

    def _see_boot(self, peer: Peer, boot: str) -> None:
        for lost in self.routes.see_boot(peer, boot):
            self._dispatch(ev.PeerGone(lost))
        self.on_news(peer)


def _ignore(_: Peer) -> None:
    """Nobody wants to know."""
