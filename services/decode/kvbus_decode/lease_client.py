"""Requests to prefill agents for fetches: route, lease, renewal and `Commit`."""

import asyncio
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import anyio
import structlog

from kvbus.agent.loop import failure, guarded
from kvbus.agent.service import Agent
from kvbus.errors import ErrorCode, KVBusError, LocalError, RequestTimeout
from kvbus.protocol.commit_cell import CommitCell
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import Empty, Message, from_body
from kvbus.protocol.peer import (
    MAX_COMMITS,
    AwaitedOffer,
    AwaitOffer,
    CheckMemory,
    Commit,
    Decline,
    Release,
    ReportCommits,
)
from kvbus.protocol.ticket import Rendezvous, Ticket
from kvbus.protocol.tools import OfferParked
from kvbus.table.table import Promise
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
COMMITS_TIMEOUT_S = 60.0
"""Until then each new connection sends the request again."""
DRAIN_PERIOD_S = 1.0
MAX_PARKED = 4_096
"""Parked offers that are known by events."""
WITHOUT_FAULT = (ErrorCode.CANCELLED, ErrorCode.TIMEOUT, ErrorCode.BUSY)

Dispatch = Callable[[ev.Event], None]
Settle = Callable[[Message | KVBusError], None]
Checks = list[tuple[Source, CheckMemory]]
SourceKey = tuple[RemoteAgent, str]


class LeaseClient:
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
        self._draining: dict[FetchResources, None] = {}
        self._driven: dict[SourceKey, Source] = {}
        self._is_driving = False
        self._committed: defaultdict[tuple[Peer, str], dict[str, str]] = defaultdict(dict)
        """Unreported commits by cell: tokens by offer."""
        self._parked = OrderedDict[tuple[str, str], ev.PoolName]()
        """Pools by boot id of their agent and offer."""

    def hold_peer(self, command: ev.AcquirePeer) -> None:
        try:
            self._hold(command)
        except Exception as error:
            self._fail_step(command.requested.resources, failure(error))

    def _hold(self, command: ev.AcquirePeer) -> None:
        ticket = command.requested.ticket
        fetch: FetchResources = command.requested.resources
        self._remove_offer(fetch)  # the ticket of a rendezvous names another offer
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
        self._hold(command)
        home = command.requested.resources.peers[0]
        self._agent.tasks.start_soon(self._find_route, command, home, promise)

    def request(self, command: ev.SendRequest, promise: Promise[ev.Event]) -> None:
        message, timeout_s, requested = command.message, command.timeout_s, command.requested
        fetch: FetchResources = requested.resources
        sent_at = self._agent.loop.time()

        def settle(outcome: Message | KVBusError) -> None:
            if isinstance(message, AwaitOffer):
                fetch.awaiting = None
            promise(
                ev.Answered(
                    fetch_id=requested.fetch_id,
                    attempt=command.attempt,
                    message=message,
                    outcome=self._admit(outcome, requested)
                    if isinstance(outcome, AwaitedOffer)
                    else outcome,
                    ticket=requested.ticket,
                    sent_at=sent_at,
                    jitter=random.random(),  # noqa: S311 - no secret
                )
            )

        if not fetch.peers:
            raise LocalError("the fetch holds no agent", code=ErrorCode.CLOSED)
        route, home = fetch.route, fetch.peers[0]
        if route is not None and route.remote_sources:
            if isinstance(message, Commit):
                checks = [
                    (
                        one,
                        one.check(fetch.offer_id, nixl_agent=message.nixl_agent and one.nixl_agent),
                    )
                    for one in route.remote_sources
                ]
                self._agent.tasks.start_soon(
                    self._commit_of_many, command, route.home, checks, settle, promise
                )
                return
            self._hold_progress(fetch, route)
        elif isinstance(message, Commit) and _commit_by_cell(requested.source, route, message):
            settle(Empty())
            self._note_commit(home, message)
            return
        if route is not None:
            route.home.request(message, timeout_s, settle, of="lease")
            return
        request_id = home.request(message, timeout_s, settle)
        if isinstance(message, AwaitOffer) and request_id is not None and not promise.is_kept:
            fetch.awaiting = request_id, settle

    def decline(self, shown: Mapping[str, Any]) -> None:
        """Decline the offer of a refused, unsigned rendezvous, over known connections only."""
        if not Rendezvous.is_one(shown):
            return
        with suppress(KVBusError):
            rendezvous = Rendezvous.from_json(shown)
            peer = self._peers.find(PeerAddress.of(rendezvous.unknown_ticket()))
            if peer is not None and not rendezvous.signature:
                peer.request(Decline(rendezvous.transfer_id), RELEASE_TIMEOUT_S, lambda _: None)

    def _note_commit(self, home: Peer, commit: Commit) -> None:
        if not self._committed:
            self._agent.loop.call_soon(self._report_commits)  # after the replies to engines
        tokens = self._committed[home, commit.agent_boot]
        tokens[commit.offer_id] = commit.token
        if len(tokens) == MAX_COMMITS:
            self._report_commits()

    # The prefill agent finds commits whose report is lost within about 1 s.
    def _report_commits(self) -> None:
        committed, self._committed = self._committed, defaultdict(dict)
        for (home, boot), tokens in committed.items():
            home.request(ReportCommits(boot, tokens), COMMITS_TIMEOUT_S, lambda _: None)

    def notify(self, command: ev.NotifyAgent) -> None:
        """End an offer or a lease; only offers open a connection."""
        ticket, message = command.ticket, command.message
        address = PeerAddress.of(ticket)
        if isinstance(message, Release):
            if (known := self._peers.find(address)) is not None:
                known.request(message, RELEASE_TIMEOUT_S, lambda _: None)
            return
        try:
            peer = self._peers.acquire(address)
        except KVBusError as error:
            log.info("offer.kept", offer_id=ticket.offer_id, reason=error.message)
            return
        peer.request(message, RELEASE_TIMEOUT_S, lambda _: self._peers.release(peer))

    # Over TCP a READ ends only if the prefill agent drives progress. It does so while a lease is
    # live, and a little longer. For READs in flight after that it needs a request.
    def drain(self, fetch: FetchResources) -> None:
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
        self._draining.pop(fetch, None)
        self._remove_offer(fetch)
        if fetch.awaiting is not None:
            request_id, settle = fetch.awaiting
            fetch.peers[0].cancel(request_id)
            settle(LocalError("the request was cancelled", code=ErrorCode.CANCELLED))
        for peer in fetch.peers:
            self._peers.release(peer)
        fetch.attempt, fetch.peers, fetch.route, fetch.choice = 0, [], None, None

    def see_event(self, event: Notice) -> None:
        if event.op == OfferParked.op:
            self._note_parked(event)
        offer_id = event.body.get("offer_id")
        known = self._by_offer.get(offer_id, ()) if isinstance(offer_id, str) else ()
        for fetch in list(known):
            self._dispatch(ev.OfferAdvanced(fetch.key))

    # A fetch that starts in the pool reads once. A refusal leads all others there, perhaps after
    # they have read all bytes.
    def _note_parked(self, event: Notice) -> None:
        with suppress(KVBusError):
            parked = from_body(OfferParked, event.body)
            pool = ev.PoolName(parked.engine_id, parked.engine_instance, parked.blocks, parked.cell)
            self._parked[event.boot, parked.offer_id] = pool
            if len(self._parked) > MAX_PARKED:
                self._parked.popitem(last=False)

    def pool_of(self, ticket: Ticket) -> ev.PoolName | None:
        return self._parked.get((ticket.agent_boot, ticket.offer_id))

    def see_gap(self, boot: str) -> None:
        for fetch in self._under_way():
            if fetch.route is not None and fetch.route.home.agent_boot == boot:
                self._dispatch(ev.OfferAdvanced(fetch.key))

    def lose(self, remote: RemoteAgent) -> int:
        """Fail the attempts that read from a process; return their number."""
        lost = [fetch for fetch in self._under_way() if fetch.reads_from(remote)]
        for fetch in lost:
            self._fail_step(fetch, remote.loss())
        return len(lost)

    def _under_way(self) -> list[FetchResources]:
        return [fetch for fetches in self._by_offer.values() for fetch in fetches]

    def _fail_step(self, fetch: FetchResources, error: KVBusError) -> None:
        self._dispatch(ev.StepFailed(fetch.key, fetch.attempt, error))

    def _admit(self, awaited: AwaitedOffer, requested: ev.Requested) -> Ticket | KVBusError:
        digest = requested.request.prompt_digest
        try:
            return self._tickets.admit_ticket(awaited.ticket, requested.engine_id, digest)
        except KVBusError as error:
            return error

    def _remove_offer(self, fetch: FetchResources) -> None:
        known = self._by_offer.get(fetch.offer_id, {})
        known.pop(fetch, None)
        if not known:
            self._by_offer.pop(fetch.offer_id, None)

    def _hold_route(self, fetch: FetchResources, route: Route) -> None:
        for source in route.remote_sources:
            fetch.peers.append(self._peers.acquire(source.peer.address))
        fetch.route, fetch.replica_index = route, route.next_replica_index()

    async def _find_route(
        self, command: ev.FindRoute, home: Peer, promise: Promise[ev.Event]
    ) -> None:
        async def find_route() -> None:
            requested, attempt, timeout_s = command.requested, command.attempt, command.timeout_s
            fetch: FetchResources = requested.resources
            ticket, engine = requested.source, fetch.engine
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

    async def _commit_of_many(
        self,
        command: ev.SendRequest,
        home: Source,
        checks: Checks,
        settle: Settle,
        promise: Promise[ev.Event],
    ) -> None:
        fetch: FetchResources = command.requested.resources
        timeout_s, deadline = command.timeout_s, fetch.deadline
        try:
            queries = (source.query(check, timeout_s) for source, check in checks)
            await asyncio.gather(*queries)
            if self._agent.loop.time() >= deadline:
                raise RequestTimeout("the other agents of the engine answered after the deadline")
            if fetch.attempt != command.attempt:
                raise LocalError("the attempt is over", code=ErrorCode.CANCELLED)
            home.request(command.message, timeout_s, settle, of="lease")
        except Exception as error:
            reason = failure(error)
            if not promise.is_kept:
                settle(reason)

    def _hold_progress(self, fetch: FetchResources, route: Route) -> None:
        attempt, lease_s = fetch.attempt, self._config.lease_s

        def on_reply(reply: Empty | KVBusError) -> None:
            if isinstance(reply, KVBusError) and reply.code not in WITHOUT_FAULT:
                self._dispatch(ev.StepFailed(fetch.key, attempt, reply))

        for source in route.remote_sources:
            check = source.check(fetch.offer_id, progress_s=lease_s, nixl_agent=source.nixl_agent)
            source.request(check, lease_s, on_reply)

    async def _drain(self) -> None:
        """Send requests until the blocks are free: a refusal may be temporary."""
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
        source.request(check, DRAIN_PERIOD_S, _note_refusal)


def _key_of(source: Source) -> SourceKey:
    return source.remote, source.memory_id


def _commit_by_cell(ticket: Ticket, route: Route | None, commit: Commit) -> bool:
    """Return whether the commit by the cell succeeded."""
    memory = None if route is None else route.home.mapped
    if (
        not ticket.cell
        or commit.part
        or commit.tables is None
        or memory is None
        or not memory.cells
    ):
        return False
    if commit.nixl_agent:  # only the prefill agent knows whether it has replaced that data process
        return False
    if memory.closed:  # for example because the agent has revoked the key
        return False
    return CommitCell(memory.cells.swap, ticket).commit(commit.token)


def _note_refusal(reply: Empty | KVBusError) -> None:
    if isinstance(reply, KVBusError):
        log.debug("drain.refused", code=reply.code.value, reason=reply.message)
