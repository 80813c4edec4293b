"""Asks the prefill agent for what the fetch table wants: a route, a lease, more time, a yes.

Refuses to decide: every answer goes back to the table as an event, exactly one for each command.
"""

from collections.abc import Callable

import structlog

from kvbus.agent.guard import guarded
from kvbus.agent.service import Agent
from kvbus.bus import EventListener
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol.envelope import Body, Notice
from kvbus.protocol.message import Message, from_body, to_body
from kvbus.protocol.peer import Claim, Confirm, Granted, Release, Renew
from kvbus.protocol.ticket import Ticket
from kvbus_decode import fetch_events as ev
from kvbus_decode.config import DecodeConfig
from kvbus_decode.peers import Peer, PeerDirectory, route_key
from kvbus_decode.works import Work, Works

log = structlog.get_logger()

RELEASE_TIMEOUT_S = 5.0

Answer = Callable[[Body], ev.Event]
Failure = Callable[[str, KVBusError], ev.Event]


class LeaseRequests(EventListener):
    """Requests to prefill agents for the fetches in ``works``; ``dispatch`` takes the answers."""

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        works: Works,
        dispatch: Callable[[ev.Event], None],
    ) -> None:
        self._agent, self._config, self._dispatch = agent, config, dispatch
        self._works = works
        self.peers = PeerDirectory(
            agent, config, on_lost=lambda boot: dispatch(ev.PeerLost(boot)), listener=self
        )

    def end(self, fetch_id: str) -> None:
        """Nothing more will be asked for this fetch."""
        work = self._works.end(fetch_id)
        if work is not None and work.peer is not None:
            self.peers.release(work.peer)

    def resolve(self, command: ev.ResolvePeer) -> None:
        """Find the route: at once when it is known, by a handshake otherwise."""
        requested, ticket = command.requested, command.requested.ticket
        try:
            engine = self._agent.engines.engine(requested.engine_id)
            work = Work(requested, engine)
            self._works.begin(work)
            work.peer = self.peers.acquire(ticket.endpoint)
        except KVBusError as error:
            self._dispatch(ev.StepFailed(command.fetch_id, error))
            return
        work.route = work.peer.routes.get(route_key(ticket, work.engine))
        if work.route is not None:
            self._dispatch(ev.PeerReady(work.fetch_id))
        else:
            self._agent.tasks.start_soon(self._resolve, work, work.peer, command.timeout_s)

    def claim(self, command: ev.SendClaim) -> None:
        """Ask for the lease."""
        ticket = self._works[command.fetch_id].requested.ticket
        body = Claim(
            agent_boot=ticket.agent_boot,
            offer_id=ticket.offer_id,
            reader_id=f"{self._agent.identity.boot}/{command.fetch_id}",
            lease_s=self._config.lease_s,
        )
        self._ask(
            command.fetch_id, body, command.timeout_s, self._granted(command.fetch_id, ticket)
        )

    def renew(self, command: ev.SendRenew) -> None:
        """Ask for a longer lease, and for what is new."""
        ticket = self._works[command.fetch_id].requested.ticket
        body = Renew(
            agent_boot=ticket.agent_boot,
            offer_id=ticket.offer_id,
            epoch=command.epoch,
            lease_s=self._config.lease_s,
            known_blocks=dict(command.known_blocks),
        )
        self._ask(
            command.fetch_id,
            body,
            command.timeout_s,
            self._granted(command.fetch_id),
            failed=ev.RenewFailed,
        )

    def confirm(self, command: ev.SendConfirm) -> None:
        """Ask whether what was read is valid."""
        ticket = self._works[command.fetch_id].requested.ticket
        body = Confirm(agent_boot=ticket.agent_boot, offer_id=ticket.offer_id, epoch=command.epoch)
        confirmed = ev.LeaseConfirmed(command.fetch_id)
        self._ask(command.fetch_id, body, command.timeout_s, lambda _: confirmed)

    def give_back(self, command: ev.SendRelease) -> None:
        """Return a lease; when that fails, it ends by itself."""
        peer = self.peers.find(command.ticket.endpoint)
        if peer is None:
            return
        body = Release(
            agent_boot=command.ticket.agent_boot,
            offer_id=command.ticket.offer_id,
            epoch=command.epoch,
            code=command.code,
        )
        try:
            peer.client.send(
                body.op, to_body(body), timeout_s=RELEASE_TIMEOUT_S, on_reply=lambda _: None
            )
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

    async def _resolve(self, work: Work, peer: Peer, timeout_s: float) -> None:
        async def find_route() -> None:
            ticket = work.requested.ticket
            work.route = await self.peers.route(peer, ticket, work.engine, timeout_s=timeout_s)
            self._dispatch(ev.PeerReady(work.fetch_id))

        await guarded(find_route, lambda error: self._dispatch(ev.StepFailed(work.fetch_id, error)))

    def _granted(self, fetch_id: str, claimed: Ticket | None = None) -> Answer:
        sent_at = self._agent.loop.time()
        return lambda body: ev.LeaseGranted(fetch_id, sent_at, from_body(Granted, body), claimed)

    def _ask(
        self,
        fetch_id: str,
        body: Message,
        timeout_s: float,
        answer: Answer,
        *,
        failed: Failure = ev.StepFailed,
    ) -> None:
        """Send a request; its reply, or the error in place of it, becomes the step's event."""

        def on_reply(outcome: Body | KVBusError) -> None:
            try:
                if isinstance(outcome, KVBusError):
                    raise outcome
                event = answer(outcome)
            except KVBusError as error:
                event = failed(fetch_id, error)
            self._dispatch(event)

        peer = self._works[fetch_id].peer
        try:
            if peer is None:
                raise LocalError("the fetch has no peer", code=ErrorCode.INTERNAL)
            peer.client.send(body.op, to_body(body), timeout_s=timeout_s, on_reply=on_reply)
        except KVBusError as error:
            self._dispatch(failed(fetch_id, error))
