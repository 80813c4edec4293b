"""Asks the prefill agent for what the fetch table wants: a route, a lease, more time, a yes.

Every answer goes back to the table as an event, exactly one for each command.
"""

import random
from collections import defaultdict
from collections.abc import Callable

import structlog

from kvbus.agent.loop import guarded
from kvbus.agent.service import Agent
from kvbus.bus import EventListener
from kvbus.errors import ErrorCode, KVBusError, RemoteError, RequestTimeout
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import Message
from kvbus.protocol.peer import Met, Release, Take
from kvbus.protocol.ticket import Ticket
from kvbus_decode.active import ActiveFetch
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch import events as ev
from kvbus_decode.peer.directory import ENGINE_READY, Peer, PeerAddress, PeerDirectory
from kvbus_decode.peer.draining import Draining
from kvbus_decode.peer.handshake import RouteBook
from kvbus_decode.peer.memory_check import check_memory
from kvbus_decode.peer.route import Route
from kvbus_decode.tickets import TicketGate

log = structlog.get_logger()

RELEASE_TIMEOUT_S = 5.0
WITHOUT_FAULT = (ErrorCode.CANCELLED, ErrorCode.TIMEOUT, ErrorCode.BUSY)


class LeaseClient(EventListener):
    """Requests to prefill agents for the fetches under way; ``dispatch`` takes the answers.

    ``choose`` says how a fetch is read on a new route.
    """

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        tickets: TicketGate,
        dispatch: Callable[[ev.Event], None],
        choose: Callable[[Route, ev.Requested], object],
    ) -> None:
        self._agent, self._config, self._dispatch = agent, config, dispatch
        self._tickets, self._choose = tickets, choose
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
        try:
            fetch = self.begin(command.requested)
            if fetch.route is None:
                self._hold_route(fetch, command.requested.route, command.requested.choice)
        except KVBusError as error:
            self._dispatch(ev.StepFailed(command.fetch_id, error))

    def ask(self, command: ev.Ask) -> None:
        """Ask the agent of the ticket; what it says, or why it was not asked, is `Answered`."""
        requested, message = command.requested, command.message
        fetch_id, ticket, sent_at = requested.fetch_id, requested.ticket, self._agent.loop.time()

        def settle(outcome: Message | KVBusError) -> None:
            self._dispatch(
                ev.Answered(
                    fetch_id=fetch_id,
                    message=message,
                    outcome=self._usable(outcome, requested),
                    ticket=ticket,
                    sent_at=sent_at,
                    luck=random.random(),  # noqa: S311 - no secret
                )
            )

        try:
            fetch = self.begin(requested)
            if fetch.route is None:
                self._hold_route(fetch, requested.route, requested.choice)
        except KVBusError as error:
            settle(error)
            return
        route = fetch.route
        if route is None or not route.others:
            fetch.home.ask(message, command.timeout_s, settle)
        elif isinstance(message, Take):
            self._take_of_many(fetch, route, message, command.timeout_s, settle)
        else:
            self._hold_progress(fetch, route, command.timeout_s)
            fetch.home.ask(message, command.timeout_s, settle)

    def _usable(
        self, outcome: Message | KVBusError, requested: ev.Requested
    ) -> Message | Ticket | KVBusError:
        """The reply, of `Meet` the ticket; an error if that may not be used here."""
        if not isinstance(outcome, Met):
            return outcome
        try:
            return self._tickets.admit_ticket(
                outcome.ticket, requested.engine_id, requested.asked.prompt_digest
            )
        except KVBusError as error:
            return error

    def _take_of_many(
        self,
        fetch: ActiveFetch,
        route: Route,
        message: Take,
        timeout_s: float,
        settle: Callable[[Message | KVBusError], None],
    ) -> None:
        """Ask the agents without the lease first whether their memory is still the same."""

        def on_checked(error: KVBusError | None) -> None:
            if self.active.get(fetch.fetch_id) is not fetch:  # it ended while they were asked
                return
            if error is None and self._agent.loop.time() < fetch.deadline:
                fetch.home.ask(message, timeout_s, settle)
                return
            self.routes.forget(route)
            late = RequestTimeout("the other agents of the engine answered after the deadline")
            settle(error or late)

        offer_id = fetch.requested.ticket.offer_id
        check_memory(route, route.others, offer_id, timeout_s=timeout_s, on_end=on_checked)

    def tell(self, command: ev.Tell) -> None:
        """Have an agent end something; when that fails, it ends by itself.

        A lease is given back over the connection that there is. The route may be why the fetch
        failed: a rank at another agent may have come back, or the connection is broken, which all
        routes to that agent share.
        """
        ticket, message = command.ticket, command.message
        address = PeerAddress.of(ticket)
        if isinstance(message, Release):
            if message.code != ErrorCode.CANCELLED:
                self.routes.forget_multi_agent(ticket)
            if message.code == ErrorCode.PEER_LOST:
                self.routes.forget_connection(ticket.agent_boot)
            known = self.peers.find(address)
            if known is not None:
                known.ask(message, RELEASE_TIMEOUT_S, lambda _: None)
            return
        try:
            peer = self.peers.acquire(address)
        except KVBusError as error:
            log.info("offer.kept", offer_id=ticket.offer_id, reason=error.message)
            return
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
            engines, engine_id = self._agent.engines, requested.engine_id
            if requested.access:
                engine = engines.part(engine_id, (), access=requested.access)
            else:
                engine = engines.engine(engine_id)
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

    async def _resolve(self, fetch: ActiveFetch, timeout_s: float) -> None:
        async def find_route() -> None:
            ticket, engine = fetch.requested.ticket, fetch.engine
            route = await self.routes.route(fetch.home, ticket, engine, timeout_s=timeout_s)
            choice = self._choose(route, fetch.requested)
            if self.active.get(fetch.fetch_id) is fetch:  # else it has ended meanwhile
                self._hold_route(fetch, route, choice)
                self._dispatch(ev.PeerReady(fetch.fetch_id))

        def fail(error: KVBusError) -> None:
            self._dispatch(ev.StepFailed(fetch.fetch_id, error))

        await guarded(find_route, fail)

    def _hold_route(self, fetch: ActiveFetch, route: object, choice: object) -> None:
        """Hold every peer of the route, on which this path was chosen."""
        if isinstance(route, Route):
            num_held = len(fetch.peers) - 1
            for source in route.others[num_held:]:
                fetch.peers.append(self.peers.acquire(source.peer.address))
            fetch.route, fetch.replica_index = route, route.next_replica_index()
            fetch.choice = choice

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
            for fetch in list(self.active.values()):
                if fetch.requested.ticket.agent_boot == lost:
                    error = RemoteError("the prefill agent is gone", code=ErrorCode.PEER_LOST)
                    self._dispatch(ev.StepFailed(fetch.fetch_id, error))
        self.on_news(peer)


def _ignore(_: Peer) -> None:
    """Nobody wants to know."""
