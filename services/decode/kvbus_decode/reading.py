"""Carries out what the fetch table asks for: requests to the prefill agent, and NIXL reads.

Refuses to decide: every result goes back to the table as an event, exactly one for each command.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import structlog

from kvbus.agent.guard import guarded
from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.service import Agent
from kvbus.bus import EventListener
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError
from kvbus.planning import Descriptors
from kvbus.protocol.envelope import Body, Notice
from kvbus.protocol.message import Message, from_body, to_body
from kvbus.protocol.peer import Claim, Confirm, Granted, Release, Renew
from kvbus.protocol.ticket import Ticket
from kvbus.transport import Read, ReadOutcome, ReadStatus
from kvbus_decode import fetch_events as ev
from kvbus_decode.config import DecodeConfig
from kvbus_decode.peers import Peer, PeerDirectory, Route, route_key

log = structlog.get_logger()

MAX_INLINE_DESCRIPTORS = 16_384
RELEASE_TIMEOUT_S = 5.0

Answer = Callable[[Body], ev.Event]
Failure = Callable[[str, KVBusError], ev.Event]


@dataclass(slots=True, eq=False)
class Work:
    """One fetch that is under way, and what it uses."""

    requested: ev.Requested
    engine: LocalEngine
    peer: Peer | None = None
    route: Route | None = None
    read: Read | None = None
    aborted: bool = False

    @property
    def fetch_id(self) -> str:
        """The key of the fetch in the table."""
        return self.requested.fetch_id


@dataclass(slots=True)
class _InFlight:
    """Fetches whose transfers can still write into one engine."""

    fetch_ids: set[str] = field(default_factory=set)
    none_left: anyio.Event = field(default_factory=anyio.Event)


class Reader(EventListener):
    """The hands of the fetch table; ``dispatch`` takes the events that come of its ``works``."""

    def __init__(
        self, agent: Agent, config: DecodeConfig, dispatch: Callable[[ev.Event], None]
    ) -> None:
        self._agent, self._config, self._dispatch = agent, config, dispatch
        self.works: dict[str, Work] = {}
        self._by_offer: dict[str, set[str]] = defaultdict(set)
        self._in_flight: dict[LocalEngine, _InFlight] = {}
        self.peers = PeerDirectory(
            agent, config, on_lost=lambda boot: dispatch(ev.PeerLost(boot)), listener=self
        )

    def end(self, fetch_id: str) -> None:
        """Nothing more will be asked for this fetch."""
        work = self.works.pop(fetch_id, None)
        if work is None:
            return
        offer_id = work.requested.ticket.offer_id
        self._by_offer[offer_id].discard(fetch_id)
        if not self._by_offer[offer_id]:
            del self._by_offer[offer_id]
        if work.peer is not None:
            self.peers.release(work.peer)

    def resolve(self, command: ev.ResolvePeer) -> None:
        """Find the route: at once when it is known, by a handshake otherwise."""
        requested, ticket = command.requested, command.requested.ticket
        try:
            engine = self._agent.engines.engine(requested.engine_id)
            work = self.works[command.fetch_id] = Work(requested, engine)
            self._by_offer[ticket.offer_id].add(work.fetch_id)
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
        ticket = self.works[command.fetch_id].requested.ticket
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
        ticket = self.works[command.fetch_id].requested.ticket
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
        ticket = self.works[command.fetch_id].requested.ticket
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

    def start_read(self, command: ev.StartRead) -> None:
        """Post the READs of a fetch; large ones are planned in a thread."""
        work = self.works[command.fetch_id]
        self._in_flight.setdefault(work.engine, _InFlight()).fetch_ids.add(work.fetch_id)
        if _num_descriptors(work) > MAX_INLINE_DESCRIPTORS:
            self._agent.tasks.start_soon(self._plan_aside, work, command)
            return
        try:
            rows = _descriptors(work, command)
        except KVBusError as error:
            self._end_read(work, 0, error)
        else:
            self._post(work, rows)

    def abort_read(self, command: ev.AbortRead) -> None:
        """Post nothing more; the read's end follows."""
        work = self.works[command.fetch_id]
        work.aborted = True
        if work.read is not None:
            work.read.abort()

    async def reads_done(self, engine: LocalEngine) -> None:
        """Return when no transfer can write into ``engine`` any more."""
        in_flight = self._in_flight.get(engine)
        if in_flight is not None:
            await in_flight.none_left.wait()

    def on_event(self, endpoint: str, event: Notice) -> None:
        """An offer or lease changed: its fetches ask what is true."""
        offer_id = event.body.get("offer_id")
        for fetch_id in tuple(self._by_offer.get(offer_id, ())) if offer_id else ():
            self._dispatch(ev.OfferAdvanced(fetch_id))

    def on_gap(self, endpoint: str, boot: str, topic: str) -> None:
        """Something of this agent was missed: all of its fetches ask."""
        for work in list(self.works.values()):
            if work.requested.ticket.agent_boot == boot:
                self._dispatch(ev.OfferAdvanced(work.fetch_id))

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

        peer = self.works[fetch_id].peer
        try:
            if peer is None:
                raise LocalError("the fetch has no peer", code=ErrorCode.INTERNAL)
            peer.client.send(body.op, to_body(body), timeout_s=timeout_s, on_reply=on_reply)
        except KVBusError as error:
            self._dispatch(failed(fetch_id, error))

    async def _plan_aside(self, work: Work, command: ev.StartRead) -> None:
        async def plan() -> None:
            self._post(work, await anyio.to_thread.run_sync(_descriptors, work, command))

        await guarded(plan, lambda error: self._end_read(work, 0, error))

    def _post(self, work: Work, rows: Descriptors) -> None:
        try:
            if work.aborted or work.route is None:
                raise LocalError("the fetch ended before its read", code=ErrorCode.CANCELLED)
            work.read = self._agent.transport.read(
                work.route.nixl_agent,
                rows.local,
                rows.remote,
                on_end=lambda outcome: self._on_read_end(work, outcome),
            )
        except LocalError as error:
            self._end_read(work, 0, error)

    def _on_read_end(self, work: Work, outcome: ReadOutcome) -> None:
        error: KVBusError | None = outcome.error
        if outcome.status is ReadStatus.ABORTED:
            error = LocalError("the read was aborted", code=ErrorCode.CANCELLED)
        self._end_read(work, outcome.num_bytes, error)

    def _end_read(self, work: Work, num_bytes: int, error: KVBusError | None) -> None:
        in_flight = self._in_flight[work.engine]
        in_flight.fetch_ids.discard(work.fetch_id)
        if not in_flight.fetch_ids:
            in_flight.none_left.set()
            del self._in_flight[work.engine]
        self._dispatch(ev.ReadEnded(work.fetch_id, num_bytes, error))


def _num_descriptors(work: Work) -> int:
    tokens = work.requested.num_tokens - work.requested.first_token
    return work.route.plan.num_descriptors(tokens) if work.route is not None else 0


def _descriptors(work: Work, command: ev.StartRead) -> Descriptors:
    requested = work.requested
    if work.route is None:
        raise LocalError("the fetch has no route", code=ErrorCode.INTERNAL)
    try:
        return work.route.plan.descriptors(
            command.tables,
            requested.tables,
            start=requested.first_token,
            stop=requested.num_tokens,
        )
    except (IndexError, KeyError) as error:
        raise GeometryError(f"the offer's block tables do not hold its tokens: {error}") from error
