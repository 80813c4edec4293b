"""Asks the prefill agent for what the fetch table wants: a route, a lease, more time, a yes.

Every answer goes back to the table as an event, exactly one for each command.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import structlog

from kvbus.agent.loop import guarded
from kvbus.agent.service import Agent
from kvbus.errors import ErrorCode, KVBusError, RequestTimeout
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import Empty, Message
from kvbus.protocol.peer import MAX_TAKEN, Forgo, Meet, Met, Release, Take, WordsTaken
from kvbus.protocol.ticket import Rendezvous, Ticket
from kvbus.protocol.word import Word
from kvbus_decode.chunk import ActiveFetch
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.transitions import RETRIED
from kvbus_decode.peers import Peer, PeerAddress, PeerDirectory, PeerWatcher
from kvbus_decode.route import Route, Source
from kvbus_decode.route_book import RouteBook
from kvbus_decode.tickets import TicketGate

log = structlog.get_logger()

RELEASE_TIMEOUT_S = 5.0
TAKEN_TIMEOUT_S = 60.0
"""For so long it is sent again by each new connection."""
DRAIN_PERIOD_S = 1.0
WITHOUT_FAULT = (ErrorCode.CANCELLED, ErrorCode.TIMEOUT, ErrorCode.BUSY)

Dispatch = Callable[[ev.Event], None]
Settle = Callable[[Message | KVBusError], None]
SourceKey = tuple[Peer, str, str]


class LeaseClient(PeerWatcher):
    """Requests to prefill agents for the fetches under way; ``dispatch`` takes the answers.

    ``active`` are the fetches that are under way, by id.
    """

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        peers: PeerDirectory,
        routes: RouteBook,
        *,
        tickets: TicketGate,
        active: dict[str, ActiveFetch],
        dispatch: Dispatch,
    ) -> None:
        self._agent, self._config, self._peers, self._routes = agent, config, peers, routes
        self._tickets, self._active = tickets, active
        self._dispatch = dispatch
        self._by_offer: defaultdict[str, set[str]] = defaultdict(set)
        self._draining: dict[str, ActiveFetch] = {}
        self._driven: dict[SourceKey, Source] = {}
        """What draining fetches read, each memory once."""
        self._is_driving = False
        self._taken: defaultdict[tuple[Peer, str], dict[str, str]] = defaultdict(dict)
        """Of each agent's process, the offers that were taken by their words, with their tokens."""

    def hold(self, command: ev.HoldPeer) -> None:
        """Keep the peers of a fetch; find its route, by a handshake, where it is not known."""
        requested = command.requested
        fetch = self._active.get(requested.fetch_id)
        if fetch is None:
            fetch = ActiveFetch(
                key=requested.fetch_id,
                requested=requested,
                engine=requested.engine,
                deadline=command.deadline,
                attempt=command.attempt,
            )
            self._active[fetch.key] = fetch
        else:  # the agent names where the offer is
            self._forget_offer(fetch)
            fetch.requested = requested
        self._by_offer[requested.ticket.offer_id].add(fetch.key)
        try:
            self._hold_peers(fetch)
        except KVBusError as error:
            self._fail_step(fetch, error)
            return
        if command.timeout_s is not None:
            self._agent.tasks.start_soon(self._resolve, fetch, command.timeout_s)

    def ask(self, command: ev.Ask) -> None:
        """Ask the agent of the ticket; what it says, or why it was not asked, is `Answered`."""
        message, timeout_s = command.message, command.timeout_s
        fetch = self._active.get(command.fetch_id)
        if fetch is None or not fetch.peers:  # they were not there: it has failed
            return
        requested, sent_at = fetch.requested, self._agent.loop.time()

        def settle(outcome: Message | KVBusError) -> None:
            fetch.meet_id = None
            self._dispatch(
                ev.Answered(
                    fetch_id=command.fetch_id,
                    attempt=command.attempt,
                    message=message,
                    outcome=self._admit(outcome, requested)
                    if isinstance(outcome, Met)
                    else outcome,
                    ticket=requested.ticket,
                    sent_at=sent_at,
                    luck=random.random(),  # noqa: S311 - no secret
                )
            )

        route, home = fetch.route, fetch.peers[0]
        if route is not None and route.others:
            if isinstance(message, Take):
                self._agent.tasks.start_soon(
                    self._take_of_many, fetch, route, message, timeout_s, settle
                )
                return
            self._hold_progress(fetch, route)
        elif route is not None and isinstance(message, Take) and _takes_word(fetch, route, message):
            settle(Empty())
            self._note_taken(home, message)
            return
        request_id = home.ask(message, timeout_s, settle)
        if isinstance(message, Meet):
            fetch.meet_id = request_id

    def decline(self, shown: Mapping[str, Any]) -> None:
        """Decline the offer of a rendezvous that is refused as nobody signed it.

        Only an agent that is connected already is notified: what is not signed opens no connection.
        """
        if not Rendezvous.is_one(shown):
            return
        with suppress(KVBusError):
            meets = Rendezvous.from_json(shown)
            peer = self._peers.find(PeerAddress.of(meets.unknown_ticket()))
            if peer is not None and not meets.signature:
                peer.ask(Forgo(meets.transfer_id), RELEASE_TIMEOUT_S, lambda _: None)

    def _note_taken(self, home: Peer, take: Take) -> None:
        """Have its agent told, of all that this turn of the loop has taken at once."""
        if not self._taken:
            self._agent.loop.call_soon(self._tell_taken)  # behind the answers to engines
        tokens = self._taken[home, take.agent_boot]
        tokens[take.offer_id] = take.token
        if len(tokens) == MAX_TAKEN:
            self._tell_taken()

    def _tell_taken(self) -> None:
        """Where it does not come to its agent, the offer ends by its time to live."""
        taken, self._taken = self._taken, defaultdict(dict)
        for (home, boot), tokens in taken.items():
            home.ask(WordsTaken(boot, tokens), TAKEN_TIMEOUT_S, lambda _: None)

    def tell(self, command: ev.Tell) -> None:
        """Have an agent end something; when that fails, it ends by itself.

        A lease is given back over the connection that there is.
        """
        ticket, message = command.ticket, command.message
        address = PeerAddress.of(ticket)
        if isinstance(message, Release):
            if (known := self._peers.find(address)) is not None:
                known.ask(message, RELEASE_TIMEOUT_S, lambda _: None)
            return
        try:
            peer = self._peers.acquire(address)
        except KVBusError as error:
            log.info("offer.kept", offer_id=ticket.offer_id, reason=error.message)
            return
        peer.ask(message, RELEASE_TIMEOUT_S, lambda _: self._peers.release(peer))

    # Over TCP a READ ends only when the other side is driven. An agent drives itself while a lease
    # is live, and a little longer; for what is in flight after that it has to be asked.
    def drain(self, fetch_id: str) -> None:
        """It has failed, and something may still land: have its sources serve that."""
        if (fetch := self._active.get(fetch_id)) is None or fetch.route is None:
            return
        if not self._is_driving:
            self._is_driving = True
            self._agent.tasks.start_soon(self._drain)
        self._draining[fetch_id] = fetch
        for source in fetch.route.sources:
            if (key := _key_of(source)) not in self._driven:
                self._driven[key] = source
                self._drive(source)

    def end_attempt(self, command: ev.EndAttempt) -> None:
        self.forget_route(command.fetch_id, command.error.code)
        self.end(command.fetch_id)

    def forget_route(self, fetch_id: str, code: str) -> None:
        """Have the next attempt, or fetch, shake hands again: the route may be what failed."""
        fetch = self._active.get(fetch_id)
        route = None if fetch is None else fetch.route
        if route is not None and (code in RETRIED or route.others):
            self._routes.forget(route)

    def end(self, fetch_id: str) -> None:
        fetch = self._active.pop(fetch_id, None)
        self._draining.pop(fetch_id, None)
        if fetch is not None:
            self._forget_offer(fetch)
            if fetch.meet_id is not None:
                fetch.peers[0].cancel(fetch.meet_id)
            for peer in fetch.peers:
                self._peers.release(peer)

    def on_event(self, peer: Peer, event: Notice) -> None:
        """An offer or lease changed: its fetches ask what is true."""
        offer_id = event.body.get("offer_id")
        known = self._by_offer.get(offer_id, ()) if isinstance(offer_id, str) else ()
        for fetch_id in list(known):
            self._dispatch(ev.OfferAdvanced(fetch_id))

    def on_gap(self, boot: str) -> None:
        for fetch_id, fetch in list(self._active.items()):
            if fetch.route is not None and fetch.route.home.agent_boot == boot:
                self._dispatch(ev.OfferAdvanced(fetch_id))

    def on_gone(self, peer: Peer, boot: str) -> None:
        """Fail the attempts that read from it. Requests wait for the next process."""
        lost = [fetch for fetch in self._active.values() if fetch.reads_from(peer, boot)]
        level = log.warning if lost else log.info
        level("peer.lost", peer=peer.endpoint, peer_boot=boot, num_fetches=len(lost))
        for fetch in lost:
            self._fail_step(fetch, peer.loss())

    def on_boot(self, peer: Peer, boot: str, earlier: str) -> None:
        """Fail the attempts that read from its earlier process."""
        for fetch in list(self._active.values()):
            if earlier and fetch.reads_from(peer, earlier):
                self._fail_step(fetch, peer.loss())

    def _fail_step(self, fetch: ActiveFetch, error: KVBusError) -> None:
        self._dispatch(ev.StepFailed(fetch.key, fetch.attempt, error))

    def _admit(self, met: Met, requested: ev.Requested) -> Ticket | KVBusError:
        """The ticket; an error if that may not be used here."""
        digest = requested.asked.prompt_digest
        try:
            return self._tickets.admit_ticket(met.ticket, requested.engine_id, digest)
        except KVBusError as error:
            return error

    def _hold_peers(self, fetch: ActiveFetch) -> None:
        """Raises `LocalError`, and `RemoteError` for an agent that is not trusted."""
        requested = fetch.requested
        address = PeerAddress.of(requested.ticket)
        if fetch.peers and fetch.peers[0].address != address:
            self._peers.release(fetch.peers.pop())
        if not fetch.peers:
            fetch.peers.append(self._peers.acquire(address))
        if fetch.route is None and isinstance(requested.route, Route):
            self._hold_route(fetch, requested.route)
            fetch.choice = requested.choice

    def _forget_offer(self, fetch: ActiveFetch) -> None:
        """No events of its offer are for it any more."""
        offer_id = fetch.requested.ticket.offer_id
        known = self._by_offer[offer_id]
        known.discard(fetch.key)
        if not known:
            del self._by_offer[offer_id]

    def _hold_route(self, fetch: ActiveFetch, route: Route) -> None:
        for source in route.others:
            fetch.peers.append(self._peers.acquire(source.peer.address))
        fetch.route, fetch.replica_index = route, route.next_replica_index()

    def _is_active(self, fetch: ActiveFetch) -> bool:
        return self._active.get(fetch.key) is fetch

    async def _resolve(self, fetch: ActiveFetch, timeout_s: float) -> None:
        async def find_route() -> None:
            ticket, engine = fetch.requested.ticket, fetch.engine
            route = await self._routes.route(fetch.peers[0], ticket, engine, timeout_s=timeout_s)
            if self._is_active(fetch):
                self._hold_route(fetch, route)
                ready = ev.PeerReady(
                    fetch.key,
                    fetch.attempt,
                    boot=route.home.agent_boot,
                    elsewhere=route.elsewhere,
                    nixl_agent=route.home.nixl_agent,
                )
                self._dispatch(ready)

        await guarded(find_route, partial(self._fail_step, fetch))

    async def _take_of_many(
        self, fetch: ActiveFetch, route: Route, message: Take, timeout_s: float, settle: Settle
    ) -> None:
        """Ask the agents without the lease first whether their memory is still the same."""

        async def ask_all() -> None:
            offer_id, is_nixl = fetch.requested.ticket.offer_id, bool(message.nixl_agent)
            checks = [
                source.check(offer_id, nixl_agent=source.nixl_agent if is_nixl else "")
                for source in route.others
            ]
            await asyncio.gather(
                *(
                    source.peer.client.ask(check, timeout_s=timeout_s)
                    for source, check in zip(route.others, checks, strict=True)
                )
            )
            if self._agent.loop.time() >= fetch.deadline:
                raise RequestTimeout("the other agents of the engine answered after the deadline")
            if self._is_active(fetch):
                fetch.peers[0].ask(message, timeout_s, settle)

        def fail(error: KVBusError) -> None:
            if self._is_active(fetch):
                settle(error)

        await guarded(ask_all, fail)

    def _hold_progress(self, fetch: ActiveFetch, route: Route) -> None:
        """Tell the agents without the lease that they are read as long as it lasts."""

        def on_reply(reply: Empty | KVBusError) -> None:
            if isinstance(reply, KVBusError) and reply.code not in WITHOUT_FAULT:
                self._fail_step(fetch, reply)

        for source in route.others:
            lease_s = self._config.lease_s
            check = source.check(fetch.requested.ticket.offer_id, progress_s=lease_s)
            source.peer.ask(check, lease_s, on_reply)

    async def _drain(self) -> None:
        """Ask each source until the blocks are free: what one refuses, the next may do."""
        while self._draining:
            await anyio.sleep(DRAIN_PERIOD_S)
            routes = {fetch.route for fetch in self._draining.values() if fetch.route is not None}
            sources = (source for route in routes for source in route.sources)
            self._driven = {_key_of(source): source for source in sources}
            for source in self._driven.values():
                self._drive(source)
        self._is_driving = False

    def _drive(self, source: Source) -> None:
        check = source.check("", progress_s=2 * DRAIN_PERIOD_S)
        source.peer.ask(check, DRAIN_PERIOD_S, _note_refusal)


def _key_of(source: Source) -> SourceKey:
    return source.peer, source.agent_boot, source.memory_id


def _takes_word(fetch: ActiveFetch, route: Route, take: Take) -> bool:
    """Take the offer by its word, if it has one in a page here; else its agent has to be asked."""
    ticket, memory = fetch.requested.ticket, route.home.mapped
    if not ticket.word or take.part or take.tables is None or memory is None or not memory.words:
        return False
    if take.nixl_agent:  # only the prefill agent knows whether that is its data process still
        return False
    if memory.closed:  # such as by an agent that has revoked our key
        return False
    return Word(memory.words.swap, ticket).take(take.token)


def _note_refusal(reply: Empty | KVBusError) -> None:
    """A peer that does not answer is asked again; one that lost the memory drives nothing."""
    if isinstance(reply, KVBusError):
        log.debug("drain.refused", code=reply.code.value, reason=reply.message)
