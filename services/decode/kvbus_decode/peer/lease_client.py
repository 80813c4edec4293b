"""Asks the prefill agent for what the fetch table wants: a route, a lease, more time, a yes.

Refuses to decide: every answer goes back to the table as an event, exactly one for each command.
"""

from collections.abc import Callable

import structlog

from kvbus.agent.process.guard import guarded
from kvbus.agent.process.service import Agent
from kvbus.bus import EventListener
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import R, Request
from kvbus.protocol.peer import Claim, Confirm, Granted, Release, Renew
from kvbus.protocol.ticket import Ticket
from kvbus_decode.active import ActiveFetch, ActiveFetches
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch import events as ev
from kvbus_decode.peer import memory_check as checking
from kvbus_decode.peer.directory import Peer, PeerDirectory
from kvbus_decode.peer.handshake import RouteBook
from kvbus_decode.peer.route import Route

log = structlog.get_logger()

RELEASE_TIMEOUT_S = 5.0
WITHOUT_FAULT = (ErrorCode.CANCELLED, ErrorCode.TIMEOUT, ErrorCode.BUSY)

Failure = Callable[[str, KVBusError], ev.Event]


class LeaseClient(EventListener):
    """Requests to prefill agents for the fetches in ``works``; ``dispatch`` takes the answers."""

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        works: ActiveFetches,
        dispatch: Callable[[ev.Event], None],
    ) -> None:
        self._agent, self._config, self._dispatch = agent, config, dispatch
        self._works = works
        self.peers = PeerDirectory(
            agent,
            config,
            on_boot=self._see_boot,
            on_dropped=self._drop_peer,
            listener=self,
        )
        self.routes = RouteBook(agent, self.peers)

    def end(self, fetch_id: str) -> None:
        """Nothing more will be asked for this fetch."""
        work = self._works.end(fetch_id)
        for peer in work.peers if work is not None else ():
            self.peers.release(peer)

    def resolve(self, command: ev.ResolvePeer) -> None:
        """Find the route: at once when it is known, by a handshake otherwise."""
        requested, ticket = command.requested, command.requested.ticket
        try:
            engine = self._agent.engines.engine(requested.engine_id)
            deadline = self._agent.loop.time() + requested.timeout_s
            work = ActiveFetch(requested, engine, deadline)
            self._works.begin(work)
            home = self.peers.acquire(ticket.endpoint)
        except KVBusError as error:
            self._dispatch(ev.StepFailed(command.fetch_id, error))
            return
        work.peers.append(home)
        route = self.routes.find(ticket, engine)
        if route is not None:
            self._take_route(work, route)
        else:
            self._agent.tasks.start_soon(self._resolve, work, home, command.timeout_s)

    def claim(self, command: ev.SendClaim) -> None:
        """Ask for the lease."""
        self._attend(self._works[command.fetch_id], command.timeout_s)
        ticket = self._works[command.fetch_id].requested.ticket
        message = Claim(
            agent_boot=ticket.agent_boot,
            offer_id=ticket.offer_id,
            reader_id=f"{self._agent.identity.boot}/{command.fetch_id}",
            lease_s=self._config.lease_s,
        )
        self._ask(
            command.fetch_id, message, command.timeout_s, self._granted(command.fetch_id, ticket)
        )

    def renew(self, command: ev.SendRenew) -> None:
        """Ask for a longer lease, and for what is new."""
        self._attend(self._works[command.fetch_id], command.timeout_s)
        ticket = self._works[command.fetch_id].requested.ticket
        message = Renew(
            agent_boot=ticket.agent_boot,
            offer_id=ticket.offer_id,
            epoch=command.epoch,
            lease_s=self._config.lease_s,
            known_blocks=dict(command.known_blocks),
        )
        self._ask(
            command.fetch_id,
            message,
            command.timeout_s,
            self._granted(command.fetch_id),
            failed=ev.RenewFailed,
        )

    def confirm(self, command: ev.SendConfirm) -> None:
        """Ask whether what was read is valid: the agents without the lease first, then its home."""
        route = self._works[command.fetch_id].route
        if route is None:
            self._confirm(command)
            return

        def on_checked(error: KVBusError | None) -> None:
            if error is None:
                self._confirm(command)
                return
            self.routes.forget(route)
            self._dispatch(ev.StepFailed(command.fetch_id, error))

        offer_id = self._works[command.fetch_id].requested.ticket.offer_id
        checking.check(
            route, route.others, offer_id, timeout_s=command.timeout_s, on_end=on_checked
        )

    def _confirm(self, command: ev.SendConfirm) -> None:
        work = self._works.find(command.fetch_id)
        if work is None:  # it ended while the others were asked
            return
        ticket = work.requested.ticket
        message = Confirm(
            agent_boot=ticket.agent_boot, offer_id=ticket.offer_id, epoch=command.epoch
        )
        confirmed = ev.LeaseConfirmed(command.fetch_id)
        self._ask(command.fetch_id, message, command.timeout_s, lambda _: confirmed)

    def _attend(self, work: ActiveFetch, timeout_s: float) -> None:
        """Tell the agents without the lease that they are read as long as it lasts."""
        route = work.route
        if route is None:
            return

        def on_checked(error: KVBusError | None) -> None:
            if error is not None and error.code not in WITHOUT_FAULT:
                self.routes.forget(route)
                self._dispatch(ev.StepFailed(work.fetch_id, error))

        checking.attend(
            route,
            route.others,
            work.requested.ticket.offer_id,
            progress_s=self._config.lease_s,
            timeout_s=timeout_s,
            on_end=on_checked,
        )

    def give_back(self, command: ev.SendRelease) -> None:
        """Return a lease; when that fails, it ends by itself.

        The route may be why the fetch failed, should a rank elsewhere have come back as another.
        """
        if command.code is not ErrorCode.CANCELLED:
            self.routes.forget_multi_agent(command.ticket)
        peer = self.peers.find(command.ticket.endpoint)
        if peer is None:
            return
        message = Release(
            agent_boot=command.ticket.agent_boot,
            offer_id=command.ticket.offer_id,
            epoch=command.epoch,
            code=command.code,
        )
        try:
            peer.client.send(message, timeout_s=RELEASE_TIMEOUT_S, on_reply=lambda _: None)
        except LocalError:
            return

    def on_event(self, endpoint: str, event: Notice) -> None:
        """An offer or lease changed: its fetches ask what is true."""
        offer_id = event.body.get("offer_id")
        for fetch_id in self._works.of_offer(offer_id) if isinstance(offer_id, str) else ():
            self._dispatch(ev.OfferAdvanced(fetch_id))

    def on_gap(self, endpoint: str, boot: str, topic: str) -> None:
        """Something of this agent was missed: all of its fetches ask."""
        for fetch_id in self._works.of_boot(boot):
            self._dispatch(ev.OfferAdvanced(fetch_id))

    def on_silence(self, endpoint: str, boot: str | None) -> None:
        """Said in the log only: deadlines and leases decide."""
        log.warning("peer.silent", endpoint=endpoint, peer_boot=boot)

    def on_alive(self, endpoint: str, boot: str) -> None:
        """The agent is back; what it said meanwhile was missed."""
        log.info("peer.alive", endpoint=endpoint, peer_boot=boot)
        self.on_gap(endpoint, boot, "")

    async def _resolve(self, work: ActiveFetch, peer: Peer, timeout_s: float) -> None:
        async def find_route() -> None:
            ticket = work.requested.ticket
            route = await self.routes.route(peer, ticket, work.engine, timeout_s=timeout_s)
            self._take_route(work, route)

        await guarded(find_route, lambda error: self._dispatch(ev.StepFailed(work.fetch_id, error)))

    def _take_route(self, work: ActiveFetch, route: Route) -> None:
        """Hold every peer of the route, unless the fetch has ended meanwhile."""
        if self._works.find(work.fetch_id) is not work:
            return
        work.route, work.replica_index = route, route.next_replica_index()
        for source in route.sources[1:]:
            work.peers.append(self.peers.acquire(source.peer.endpoint))
        self._dispatch(ev.PeerReady(work.fetch_id))

    def _drop_peer(self, peer: Peer) -> None:
        self.routes.forget_peer(peer)

    def _see_boot(self, peer: Peer, boot: str) -> None:
        for lost in self.routes.see_boot(peer, boot):
            self._dispatch(ev.PeerGone(lost))

    def _granted(
        self, fetch_id: str, claimed: Ticket | None = None
    ) -> Callable[[Granted], ev.Event]:
        sent_at = self._agent.loop.time()
        return lambda granted: ev.LeaseGranted(fetch_id, sent_at, granted, claimed)

    def _ask(
        self,
        fetch_id: str,
        message: Request[R],
        timeout_s: float,
        answer: Callable[[R], ev.Event],
        *,
        failed: Failure = ev.StepFailed,
    ) -> None:
        """Send a request; its reply, or the error in place of it, becomes the step's event."""

        def on_reply(outcome: R | KVBusError) -> None:
            if isinstance(outcome, KVBusError):
                self._dispatch(failed(fetch_id, outcome))
            else:
                self._dispatch(answer(outcome))

        peers = self._works[fetch_id].peers
        try:
            if not peers:
                raise LocalError("the fetch has no peer", code=ErrorCode.INTERNAL)
            peers[0].client.send(message, timeout_s=timeout_s, on_reply=on_reply)
        except KVBusError as error:
            self._dispatch(failed(fetch_id, error))
