"""Decode agent: requests become events of the fetch table, its commands become I/O."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import structlog
from msgspec import convert, structs

from kvbus.agent.access import load_ticket_keys
from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.loop import failure
from kvbus.agent.service import Agent, Service
from kvbus.bus import Call, Handlers, new_secret
from kvbus.data.messages import Cut
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.geometry import check_fetched
from kvbus.planning import requested_states
from kvbus.protocol.engine import BlocksFreed, CancelFetch, HoldOffer, StartFetch
from kvbus.protocol.message import Empty
from kvbus.protocol.peer import CancelPart, FetchPart
from kvbus.protocol.ticket import Rendezvous, Ticket
from kvbus.protocol.tools import Cost, Fault, FetchEvent, PeerView, Predicted, Sharing, Status
from kvbus.table.events import EngineLost, Stopped
from kvbus.table.table import Driver
from kvbus_decode.chunk import FetchResources
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import FetchState
from kvbus_decode.fetch.table import FetchTable
from kvbus_decode.fetch_reports import (
    READINGS,
    DecodeMetrics,
    FetchHistories,
    log_fetched,
    log_retry,
)
from kvbus_decode.holds import LateFetches, OfferHolds
from kvbus_decode.lease_client import LeaseClient
from kvbus_decode.mapped import MemoryBorrower
from kvbus_decode.parts import Part, PartClient, PartServer
from kvbus_decode.paths import CostBook, PathChooser, speculative_read_of
from kvbus_decode.peers import PeerDirectory
from kvbus_decode.preconnect import PeerPreconnector
from kvbus_decode.reader import Reader
from kvbus_decode.remote_agent import PeerAddress
from kvbus_decode.route_book import RouteBook
from kvbus_decode.tickets import TicketGate

log = structlog.get_logger()

F = TypeVar("F", StartFetch, FetchPart)


class DecodeService(Service):
    def __init__(self, agent: Agent, config: DecodeConfig) -> None:
        self._config, identity = config, agent.identity
        limits = dataclasses.replace(
            config.fetch_limits, reader_agent=identity.agent_id, reader_boot=identity.agent_boot
        )
        self._table = FetchTable(limits=limits)
        driver: Driver[ev.Event] = Driver(self._table, agent.loop)
        self._dispatch = driver.dispatch
        self._tickets = TicketGate(identity.agent_id, load_ticket_keys(config.ticket_keys))
        self._metrics = DecodeMetrics(agent.metrics)
        self._chooser = chooser = PathChooser(agent, config)
        self._peers = peers = PeerDirectory(agent, config)
        self._holds = OfferHolds(agent, config, peers)
        self._late = LateFetches(agent.loop, self._holds, self._table.live.values)
        self._borrower = MemoryBorrower(agent, config)
        self.routes = RouteBook(agent, peers, self._borrower)
        self._reader = Reader(agent, config, chooser, self._metrics)
        self._leases = leases = LeaseClient(
            agent, config, peers, self.routes, tickets=self._tickets, dispatch=self._dispatch
        )
        self._preconnector = PeerPreconnector(agent, config, peers, self.routes)
        peers.on_lost, peers.on_found = leases.lose, self._preconnector.see_news
        peers.on_offer, peers.on_missed = leases.see_event, leases.see_gap
        histories = FetchHistories(self._table, self._reader.history_of)
        super().__init__(agent, self._table, driver, histories)
        self._costs = CostBook(agent, self.routes, chooser)
        self._parts = PartServer(self._part_requested, self._dispatch)
        self._others = PartClient(agent, config, peers, self._dispatch)
        driver.commands |= {
            ev.NotifyAgent: leases.notify,
            ev.AcquirePeer: leases.hold_peer,
            ev.EndAttempt: self._end_attempt,
            ev.StopReads: self._stop_reads,
            ev.NotifyEngine: self._notify,
            ev.ReportFetched: self._report_fetched,
        }
        driver.promise(ev.SendRequest, leases.request, _step_failed)
        driver.promise(ev.FindRoute, leases.find_route, _step_failed)
        driver.promise(ev.ReadChunk, self._reader.read_chunk, _read_failed)
        part_failed = partial(_read_failed, elsewhere=True)
        driver.promise(ev.RequestRemoteParts, self._others.request, part_failed)
        driver.promise(ev.EndEarlierParts, self._others.end_earlier, part_failed)
        agent.metrics.add_readings(self._readings, READINGS)

    async def start(self) -> None:
        self._preconnector.start()

    def engine_handlers(self) -> Handlers:
        return {
            HoldOffer: self._hold,
            StartFetch: self._start_in_order,
            CancelFetch: self._cancel_in_order,
        }

    def peer_handlers(self) -> Handlers:
        return {
            FetchPart: self._part_in_order,
            CancelPart: self._parts.cancel,
            Cost: lambda request, call: call.reply(self._costs.cost(request)),
        }

    def on_engine_ready(self, engine: LocalEngine) -> None:
        self._preconnector.see_engine()

    def on_engine_lost(self, engine: LocalEngine) -> None:
        self.ordering.end_engine(engine)
        self._holds.end_engine(engine)
        self._dispatch(EngineLost(engine.engine_id))
        self._reader.lose_engine(engine)
        self.routes.remove_engine(engine)

    def stop(self) -> None:
        self.ordering.close()
        self._late.close()
        self._holds.close()
        self._dispatch(Stopped())
        self._driver.stop()
        self._reader.stop()

    def counts(self) -> dict[str, int]:
        draining = self._table.num_in(FetchState.DRAINING)
        return {
            "fetches": len(self._table.live),
            "queued_fetches": self._table.num_in(FetchState.QUEUED),
            "draining_fetches": draining,
            "parts": self._parts.num_live,
            "slots": self._reader.num_slots_in_use,
            "waiting_requests": len(self.ordering),
            "holds": len(self._holds),
        }

    def on_cut(self, cut: Cut) -> None:
        self._borrower.on_cut(cut)

    async def quiesce(self, engine: LocalEngine) -> None:
        await self._reader.reads_done(engine)

    def sharing(self) -> Sharing:
        return self._borrower.sharing()

    def cost(self, request: Cost) -> Predicted:
        return self._costs.cost(request)

    def silent_peers(self) -> dict[tuple[str, str], float]:
        return self._peers.silent()

    def faults(self) -> list[Fault]:
        found = (source.fault for route in self.routes for source in route.sources)
        return list(dict.fromkeys(fault for fault in found if fault))

    def view(self, endpoint: str) -> PeerView:
        listed = self._preconnector.view(endpoint)
        return structs.replace(
            listed,
            num_routes=self.routes.num_from(endpoint),
            problem=listed.problem or self._peers.refusal_of(endpoint),
        )

    def _start_in_order(self, request: StartFetch, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        start = partial(self._start_fetch, call=call)
        end_hold = partial(self._end_hold, engine, request)
        about = "fetch", request.fetch_id
        try:
            self._after_gpu_work(engine, about, request, call, start, on_refused=end_hold)
        except KVBusError:
            end_hold()
            raise

    def _cancel_in_order(self, cancel: CancelFetch, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        end = partial(self._cancel_fetch, cancel, call)
        self.ordering.submit(engine, ("fetch", cancel.fetch_id), call, end)

    def _part_in_order(self, part: FetchPart, call: Call) -> None:
        """A ``cancel_part`` does not wait: `PartServer` then never begins the part."""
        start = partial(self._parts.fetch, call=call)
        if not part.after:
            start(part)
            return
        engine = self._agent.engines.part(part.engine_id, part.ranks, rank_secret=part.rank_secret)
        call.on_end = partial(self.ordering.drop, engine, call)
        self._after_gpu_work(engine, call, part, call, start)

    def _after_gpu_work(
        self,
        engine: LocalEngine,
        about: object,
        request: F,
        call: Call,
        start: Callable[[F], None],
        *,
        on_refused: Callable[[], None] | None = None,
    ) -> None:
        """The wait counts towards the deadline of the fetch."""
        loop, timeout_s = self._agent.loop, request.timeout_s or self._config.fetch_timeout_s
        deadline = loop.time() + timeout_s

        def run() -> None:
            left_s = max(1e-3, deadline - loop.time())
            start(structs.replace(request, timeout_s=left_s) if request.after else request)

        waits: dict[str, Any] = {"after": request.after, "wait_s": timeout_s}
        self.ordering.submit(engine, about, call, run, on_refused=on_refused, **waits)

    def _start_fetch(self, request: StartFetch, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        try:
            shown = self._tickets.admit(request.ticket, engine.engine_id, request.prompt_digest)
        except KVBusError:
            self._leases.decline(request.ticket)
            raise
        rendezvous = shown if isinstance(shown, Rendezvous) else None
        ticket = shown.unknown_ticket() if isinstance(shown, Rendezvous) else shown
        boot = ticket.agent_boot if rendezvous is None else None
        if (peer := self._peers.find(PeerAddress.of(ticket))) is not None:
            peer.check_answers(boot)
        self._late.watch()
        key = ev.fetch_key(engine.engine_id, request.fetch_id)
        remote_ranks = engine.remote_ranks
        self._dispatch(
            self._requested(
                engine,
                request,
                ticket,
                key,
                reply_to=call,
                rendezvous=rendezvous,
                remote_ranks=remote_ranks,
                pool=self._leases.pool_of(ticket),
            )
        )

    def _part_requested(self, part: FetchPart, caller: Part) -> ev.Requested:
        engine = self._agent.engines.part(part.engine_id, part.ranks, rank_secret=part.rank_secret)
        ticket = self._tickets.read(part.ticket)
        pool = ev.PoolName(part.pool_id, part.pool_instance) if part.pool_id else None
        route = self.routes.find(pool.holds(ticket) if pool else ticket, engine)
        if route is not None and route.memory_ids != part.memory_ids:
            route.close()  # a rank of the prefill engine has restarted since
        request = convert(part, StartFetch, from_attributes=True)
        rank_secret = part.rank_secret
        return self._requested(
            *(engine, request, ticket, caller.key),
            reply_to=caller,
            rank_secret=rank_secret,
            pool=pool,
        )

    def _requested(
        self, engine: LocalEngine, request: StartFetch, ticket: Ticket, key: str, **more: Any
    ) -> ev.Requested:
        first_token, num_tokens = request.first_token, request.num_tokens
        if first_token > num_tokens:
            raise LocalError(
                f"first_token {first_token} is behind num_tokens {num_tokens}",
                field="first_token",
            )
        check_fetched(
            engine.spec, request.tables, first_token, num_tokens, num_blocks=engine.num_blocks
        )
        if request.at_most and (
            engine.remote_ranks or any(group.window for group in engine.spec.groups)
        ):
            raise LocalError(
                "at_most is not for engines with windows, or with ranks at other agents",
                field="at_most",
            )
        resources = FetchResources(key, engine)
        requested = ev.Requested(
            fetch_id=key,
            engine_id=engine.engine_id,
            request=request,
            resources=resources,
            ticket=ticket,
            timeout_s=request.timeout_s or self._config.fetch_timeout_s,
            has_state=bool(requested_states(engine.spec.groups, request.tables)),
            commit_token=request.token or new_secret(),
            **more,
        )
        route = self.routes.find(requested.source, engine) if requested.has_ticket else None
        if route is not None:
            choice = self._chooser.choose(route, first_token, num_tokens)
            speculative = speculative_read_of(requested, route, choice) if choice else None
            resources.route, resources.choice = route, choice
            requested = structs.replace(
                requested,
                has_route=True,
                speculative=speculative,
                boot=route.home.agent_boot,
                elsewhere=route.elsewhere,
                nixl_agent=route.home.nixl_agent,
            )
        return requested

    def _hold(self, hold: HoldOffer, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        self._holds.begin(engine, self._tickets.admit(hold.ticket, engine.engine_id))
        call.reply(Empty())

    def _end_hold(self, engine: LocalEngine, request: StartFetch) -> None:
        ticket = request.ticket
        self._holds.end(engine, ticket.get("transfer_id", ticket.get("offer_id")))

    def _cancel_fetch(self, cancel: CancelFetch, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        key = ev.fetch_key(engine.engine_id, cancel.fetch_id)
        if self._table.find(key) is None:
            raise LocalError(f"no fetch '{cancel.fetch_id}'", code=ErrorCode.FETCH_UNKNOWN)
        self._dispatch(ev.CancelRequested(key, call, cancel.release_offer))

    def _stop_reads(self, command: ev.StopReads) -> None:
        self._leases.drain(command.resources)
        command.resources.stop_parts()
        self._reader.stop_reads(command)

    # If UCX has the kernel copy, memory that its engine has truncated raises no SIGBUS here. The
    # READ fails as if the peer were lost, in each attempt. So this agent checks the engine's files.
    def _end_attempt(self, command: ev.EndAttempt) -> None:
        self._leases.end(command.requested.resources)
        if command.error.code is not ErrorCode.OFFER_PARKED:
            self._metrics.count_retry(command.error.code)
        log_retry(command)
        self._agent.engines.find_cuts(command.requested.engine_id)

    def _report_fetched(self, report: ev.ReportFetched) -> None:
        """Reply to the engine before logging: the engine is waiting."""
        requested = report.requested
        fetch: FetchResources = requested.resources
        self._end_hold(fetch.engine, requested.request)
        whole_blocks = fetch.fills_blocks(requested.request)
        fetched = structs.replace(report.fetched, whole_blocks=whole_blocks)
        if requested.rank_secret or not fetch.engine.lost:  # a lost engine waits for no reply
            requested.reply_to.reply(fetched)
        if not fetched.code:
            self._tickets.complete(requested.ticket)
            if fetch.route is not None:
                fetch.route.home.remote.observe(fetched)
        if fetched.blocks_free:
            self._end(requested)
        self._metrics.observe(report)
        log_fetched(structs.replace(report, fetched=fetched))
        if fetched.code and self._config.log_level == "debug":
            history = self.histories.lines(Status(fetch_id=fetched.fetch_id))
            log.debug("handoff.history", fetch_id=fetched.fetch_id, history=history)
        event = FetchEvent(
            fetch_id=fetched.fetch_id, request_id=fetched.request_id, code=fetched.code
        )
        self._agent.publisher.publish(f"fetch.{fetched.outcome}", event)

    def _notify(self, command: ev.NotifyEngine) -> None:
        """Notify the engine that made the request, not a new process under its id."""
        notice, requested = command.message, command.requested
        part = self._parts.find(requested.fetch_id)
        if part is None:
            requested.resources.engine.notify(notice)
        if isinstance(notice, BlocksFreed):
            log.info("blocks.freed", fetch_id=notice.fetch_id)
            if part is not None:
                part.end()
            self._end(requested)

    def _end(self, requested: ev.Requested) -> None:
        self._leases.end(requested.resources)
        sender = self._agent.sender
        if sender is not None and (fetch := self._table.find(requested.fetch_id)) is not None:
            ticket = requested.ticket
            request = requested.request
            # the fetch of a rendezvous may have got no ticket
            trace_name = ticket.offer_id if requested.has_ticket else request.fetch_id
            traces = request.traceparent, ticket.traceparent
            sender.put(self.histories.later(fetch), trace_name, *traces)

    def _readings(self) -> dict[str, float]:
        return {
            **self.counts(),
            "ended_bytes": self._table.retired_bytes,
            "quarantined_blocks": self._table.num_quarantined_blocks(),
            "peers": len(self._peers),
            "silent_peers": len(self._peers.silent()),
            "listed_peers": self._preconnector.num_listed,
            "connected_peers": self._preconnector.num_connected,
            "engines": len(self._agent.engines.engines),
            "mapped_bytes": self._borrower.num_bytes,
        }


def _step_failed(command: Any, error: Exception) -> ev.StepFailed:
    return ev.StepFailed(command.requested.fetch_id, command.attempt, failure(error))


def _read_failed(command: Any, error: Exception, *, elsewhere: bool = False) -> ev.ReadEnded:
    return ev.ReadEnded(command.requested.fetch_id, 0, failure(error), elsewhere=elsewhere)
