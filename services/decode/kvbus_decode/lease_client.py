"""Asks the prefill agent for what the fetch table wants: a route, a lease, more time, a yes.

Every answer goes back to the table as an event, exactly one for each command.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import anyio
import structlog

from kvbus.agent.loop import failure, guarded
from kvbus.agent.service import Agent
from kvbus.errors import ErrorCode, KVBusError, LocalError, RequestTimeout
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import Empty, Message
from kvbus.protocol.peer import MAX_TAKEN, CheckMemory, Forgo, Meet, Met, Release, Take, WordsTaken
from kvbus.protocol.ticket import Rendezvous, Ticket
from kvbus.protocol.word import Word
from kvbus.table import Promise
from kvbus_decode.chunk import FetchResources
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch import events as ev
from kvbus_decode.peers import PeerDirectory
from kvbus_decode.remote_agent import Peer, PeerAddress, RemoteAgent, Source
from kvbus_decode.route import Route
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
Checks = list[tuple[Source, CheckMemory]]
SourceKey = tuple[RemoteAgent, str]


class LeaseClient:
    """Requests to prefill agents for the fetches under way; fills their `FetchResources`."""

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        peers: PeerDirectory,
        routes: RouteBook,
        *,
        tickets: TicketGate,
        dispatch: Dispatch,
    ) -> None:
        self._agent, self._config, self._peers, self._routes = agent, config, peers, routes
        self._tickets, self._dispatch = tickets, dispatch
        self._by_offer: defaultdict[str, dict[FetchResources, None]] = defaultdict(dict)
        """Those of all attempts under way."""
        self._draining: dict[FetchResources, None] = {}
        self._driven: dict[SourceKey, Source] = {}
        """What draining fetches read, each memory once."""
        self._is_driving = False
        self._taken: defaultdict[tuple[Peer, str], dict[str, str]] = defaultdict(dict)
        """Of each agent's process, the offers that were taken by their words, with their tokens."""

    def hold_peer(self, command: ev.HoldPeer) -> None:
        """Acquire the peers of an attempt, or fail it."""
        try:
            self._hold(command)
        except Exception as error:
            self._fail_step(command.requested.resources, failure(error))

    def _hold(self, command: ev.HoldPeer) -> None:
        """Raises `LocalError`, and `RemoteError` for an agent that is not trusted."""
        ticket = command.requested.ticket
        fetch: FetchResources = command.requested.resources
        self._forget_offer(fetch)  # with the ticket of a rendezvous comes another name
        fetch.attempt, fetch.deadline = command.attempt, command.deadline
        fetch.offer_id = ticket.offer_id
        self._by_offer[fetch.offer_id][fetch] = None
        address = PeerAddress.of(ticket)
        if fetch.peers and fetch.peers[0].address != address:
            self._peers.release(fetch.peers.pop(0))
        if not fetch.peers:
            fetch.peers.append(self._peers.acquire(address))
            if fetch.route is not None:
                self._hold_route(fetch, fetch.route)

    def find_route(self, command: ev.FindRoute, promise: Promise[ev.Event]) -> None:
        """Acquire the peers, and find the route, by a handshake where it is not known."""
        self._hold(command)
        home = command.requested.resources.peers[0]
        self._agent.tasks.start_soon(self._find_route, command, home, promise)

    def ask(self, command: ev.Ask, promise: Promise[ev.Event]) -> None:
        """Ask the agent of the ticket; what it says, or why it was not asked, is `Answered`."""
        message, timeout_s, requested = command.message, command.timeout_s, command.requested
        fetch: FetchResources = requested.resources
        sent_at = self._agent.loop.time()

        def settle(outcome: Message | KVBusError) -> None:
            if isinstance(message, Meet):
                fetch.meeting = None
            promise(
                ev.Answered(
                    fetch_id=requested.fetch_id,
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

        if not fetch.peers:
            raise LocalError("the fetch holds no agent", code=ErrorCode.CLOSED)
        route, home = fetch.route, fetch.peers[0]
        if route is not None and route.others:
            if isinstance(message, Take):
                checks = [
                    (
                        one,
                        one.check(fetch.offer_id, nixl_agent=message.nixl_agent and one.nixl_agent),
                    )
                    for one in route.others
                ]
                self._agent.tasks.start_soon(
                    self._take_of_many, command, route.home, checks, settle, promise
                )
                return
            self._hold_progress(fetch, route)
        elif isinstance(message, Take) and _takes_word(requested.ticket, route, message):
            settle(Empty())
            self._note_taken(home, message)
            return
        if route is not None:
            route.home.ask(message, timeout_s, settle, of="lease")
            return
        request_id = home.ask(message, timeout_s, settle)
        if isinstance(message, Meet) and request_id is not None and not promise.is_kept:
            fetch.meeting = request_id, settle

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
    def drain(self, fetch: FetchResources) -> None:
        """An attempt has failed, and something may still land: have its sources serve that."""
        if fetch.route is None:
            return
        if not self._is_driving:
            self._is_driving = True
            self._agent.tasks.start_soon(self._drain)
        self._draining[fetch] = None
        for source in fetch.route.sources:
            if (key := _key_of(source)) not in self._driven:
                self._driven[key] = source
                self._drive(source)

    def end(self, fetch: FetchResources) -> None:
        """Give back what an attempt holds; nothing of it is in flight."""
        self._draining.pop(fetch, None)
        self._forget_offer(fetch)
        if fetch.meeting is not None:
            request_id, settle = fetch.meeting
            fetch.peers[0].cancel(request_id)
            settle(LocalError("the request was cancelled", code=ErrorCode.CANCELLED))
        for peer in fetch.peers:
            self._peers.release(peer)
        fetch.attempt, fetch.peers, fetch.route, fetch.choice = 0, [], None, None

    def see_event(self, event: Notice) -> None:
        """An offer or lease changed: its fetches ask what is true."""
        offer_id = event.body.get("offer_id")
        known = self._by_offer.get(offer_id, ()) if isinstance(offer_id, str) else ()
        for fetch in list(known):
            self._dispatch(ev.OfferAdvanced(fetch.key))

    def see_gap(self, boot: str) -> None:
        """Events of this process were missed."""
        for fetch in self._under_way():
            if fetch.route is not None and fetch.route.home.agent_boot == boot:
                self._dispatch(ev.OfferAdvanced(fetch.key))

    def lose(self, remote: RemoteAgent) -> int:
        """Fail the attempts that read from it. Requests wait for the next process."""
        lost = [fetch for fetch in self._under_way() if fetch.reads_from(remote)]
        for fetch in lost:
            self._fail_step(fetch, remote.loss())
        return len(lost)

    def _under_way(self) -> list[FetchResources]:
        return [fetch for fetches in self._by_offer.values() for fetch in fetches]

    def _fail_step(self, fetch: FetchResources, error: KVBusError) -> None:
        self._dispatch(ev.StepFailed(fetch.key, fetch.attempt, error))

    def _admit(self, met: Met, requested: ev.Requested) -> Ticket | KVBusError:
        """The ticket; an error if that may not be used here."""
        digest = requested.asked.prompt_digest
        try:
            return self._tickets.admit_ticket(met.ticket, requested.engine_id, digest)
        except KVBusError as error:
            return error

    def _forget_offer(self, fetch: FetchResources) -> None:
        """No events of its offer are for it any more."""
        known = self._by_offer.get(fetch.offer_id, {})
        known.pop(fetch, None)
        if not known:
            self._by_offer.pop(fetch.offer_id, None)

    def _hold_route(self, fetch: FetchResources, route: Route) -> None:
        for source in route.others:
            fetch.peers.append(self._peers.acquire(source.peer.address))
        fetch.route, fetch.replica_index = route, route.next_replica_index()

    async def _find_route(
        self, command: ev.FindRoute, home: Peer, promise: Promise[ev.Event]
    ) -> None:
        async def find_route() -> None:
            requested, attempt, timeout_s = command.requested, command.attempt, command.timeout_s
            fetch: FetchResources = requested.resources
            ticket, engine = requested.ticket, fetch.engine
            route = await self._routes.route(home, ticket, engine, timeout_s=timeout_s)
            if fetch.attempt == attempt:
                self._hold_route(fetch, route)
            promise(
                ev.PeerReady(
                    fetch.key,
                    attempt,
                    boot=route.home.agent_boot,
                    elsewhere=route.elsewhere,
                    nixl_agent=route.home.nixl_agent,
                )
            )

        await guarded(find_route, promise.fail)

    async def _take_of_many(
        self,
        command: ev.Ask,
        home: Source,
        checks: Checks,
        settle: Settle,
        promise: Promise[ev.Event],
    ) -> None:
        """Ask the agents without the lease first whether their memory is still the same."""
        fetch: FetchResources = command.requested.resources
        timeout_s, deadline = command.timeout_s, fetch.deadline
        try:
            asked = (source.query(check, timeout_s) for source, check in checks)
            await asyncio.gather(*asked)
            if self._agent.loop.time() >= deadline:
                raise RequestTimeout("the other agents of the engine answered after the deadline")
            if fetch.attempt != command.attempt:
                raise LocalError("the attempt is over", code=ErrorCode.CANCELLED)
            home.ask(command.message, timeout_s, settle, of="lease")
        except Exception as error:
            reason = failure(error)
            if not promise.is_kept:
                settle(reason)

    def _hold_progress(self, fetch: FetchResources, route: Route) -> None:
        """Tell the agents without the lease that they are read as long as it lasts."""
        attempt, lease_s = fetch.attempt, self._config.lease_s

        def on_reply(reply: Empty | KVBusError) -> None:
            if isinstance(reply, KVBusError) and reply.code not in WITHOUT_FAULT:
                self._dispatch(ev.StepFailed(fetch.key, attempt, reply))

        for source in route.others:
            check = source.check(fetch.offer_id, progress_s=lease_s, nixl_agent=source.nixl_agent)
            source.ask(check, lease_s, on_reply)

    async def _drain(self) -> None:
        """Ask each source until the blocks are free: what one refuses, the next may do."""
        while self._draining:
            await anyio.sleep(DRAIN_PERIOD_S)
            routes = {fetch.route for fetch in self._draining if fetch.route is not None}
            sources = (source for route in routes for source in route.sources)
            self._driven = {_key_of(source): source for source in sources}
            for source in self._driven.values():
                self._drive(source)
        self._is_driving = False

    def _drive(self, source: Source) -> None:
        check = source.check("", progress_s=2 * DRAIN_PERIOD_S)
        source.ask(check, DRAIN_PERIOD_S, _note_refusal)


def _key_of(source: Source) -> SourceKey:
    return source.remote, source.memory_id


def _takes_word(ticket: Ticket, route: Route | None, take: Take) -> bool:
    """Take the offer by its word, if it has one in a page here; else its agent has to be asked."""
    memory = None if route is None else route.home.mapped
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
