"""The decode agent: requests become events of the fetch table, its commands become work."""

from collections.abc import Callable, Hashable
from functools import partial

import anyio
import structlog
from msgspec.structs import replace

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.process.service import Agent
from kvbus.agent.process.ticket_keys import load_ticket_keys
from kvbus.bus import Call, Handlers
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol.cost import Cost, Predicted
from kvbus.protocol.engine import AgentRanks, BlocksFreed, CancelFetch, Fetched, Landed, StartFetch
from kvbus.protocol.events import FetchEvent
from kvbus.protocol.mapped import Sharing
from kvbus.protocol.peer import Status
from kvbus.protocol.peer_view import PeerView
from kvbus.protocol.remote_ranks import AbortDelegate, Delegate
from kvbus.protocol.rendezvous import Rendezvous
from kvbus.protocol.trace import Remembered, Span, Trace
from kvbus.table import Driver
from kvbus_decode.active import ActiveFetch
from kvbus_decode.config import DecodeConfig
from kvbus_decode.costs import CostBook
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.state import FetchState
from kvbus_decode.fetch.table import FetchTable
from kvbus_decode.metrics import READINGS, DecodeMetrics
from kvbus_decode.peer.directory import PeerAddress
from kvbus_decode.peer.handshake import RouteBook
from kvbus_decode.peer.lease_client import LeaseClient
from kvbus_decode.peer.meeting_client import MeetingClient
from kvbus_decode.peer.route import Route
from kvbus_decode.peer.warm import WarmPeers
from kvbus_decode.read.chunk import check_tables, make_chunk
from kvbus_decode.read.delegate import DelegateServer
from kvbus_decode.read.events import ChunkEnded
from kvbus_decode.read.leg import Leg, Stage
from kvbus_decode.read.reader import Reader
from kvbus_decode.read.remote_ranks import DelegateJob
from kvbus_decode.read_ahead import ahead_of
from kvbus_decode.spans import FetchSpans
from kvbus_decode.tickets import TicketGate

log = structlog.get_logger()


class DecodeService:
    """Everything of a decode agent that is not shared with the prefill agent."""

    def __init__(self, agent: Agent, config: DecodeConfig) -> None:
        self._agent, self._config = agent, config
        self._table = FetchTable(limits=config.fetch_limits)
        self._driver: Driver[ev.Event] = Driver(self._table, agent.loop)
        self._dispatch = self._driver.dispatch
        self._leases = leases = LeaseClient(agent, config, self._dispatch, self._prepare)
        self._metrics = DecodeMetrics(agent.metrics)
        self._reader = Reader(agent, config, leases.peers, self._metrics, self._fail_fetch)
        self._costs = CostBook(agent, leases, self._reader)
        self._warm = WarmPeers(agent, config, leases.peers, leases.routes, self._reader.warm_up)
        leases.on_news = self._warm.see_peer
        self._tickets = TicketGate(agent.identity.agent_id, load_ticket_keys(config.ticket_keys))
        self._delegates = DelegateServer(agent, self._tickets, leases, self._reader)
        meetings = MeetingClient(leases, self._tickets, self._dispatch)
        self._driver.commands |= {
            ev.SendMeet: meetings.meet,
            ev.SendForgo: meetings.forgo,
            ev.ResolvePeer: leases.resolve,
            ev.HoldPeer: leases.hold_peer,
            ev.SendClaim: leases.claim,
            ev.SendRenew: leases.renew,
            ev.ReadChunk: self._read_chunk,
            ev.StopRead: self._stop_read,
            ev.SendConfirm: leases.confirm,
            ev.SendTake: leases.take,
            ev.SendRelease: leases.release,
            ev.SendWithdraw: leases.withdraw,
            ev.ReportLanded: self._report_landed,
            ev.ReportFetched: self._report_fetched,
            ev.ReportBlocksFreed: self._report_blocks_freed,
        }
        reader = self._reader
        self._spans = FetchSpans(self._table, reader.story_of, reader.stories_for_others)
        self._idle = anyio.Event()
        agent.metrics.add_readings(self._readings, READINGS)

    async def start(self) -> None:
        """Agents that are listed are met; all else is opened when it is asked for."""
        self._warm.start()

    def engine_handlers(self) -> Handlers:
        """A fetch, or its cancellation."""
        return {StartFetch: self._start_fetch, CancelFetch: self._cancel_fetch}

    def peer_handlers(self) -> Handlers:
        """Another decode agent asks for help, with an engine of ours; or a router what it costs."""
        return {
            Delegate: self._delegates.delegate,
            AbortDelegate: self._delegates.abort,
            Cost: lambda asked, call: call.reply(self.cost(asked)),
        }

    def cost(self, asked: Cost) -> Predicted:
        """What a fetch would take now; raises `LocalError`."""
        return self._costs.cost(asked, self._table.queued())

    def on_engine_ready(self, engine: LocalEngine) -> None:
        """What its copies need is made ready."""
        self._reader.expect(engine)
        self._warm.see_engine()

    def on_engine_lost(self, engine: LocalEngine) -> None:
        """Its fetches end; nobody is there to be told."""
        self._dispatch(ev.EngineLost(engine.engine_id))
        self._reader.lose_engine(engine)
        self._costs.forget(engine)
        self._leases.routes.forget_engine(engine)

    async def copied(self, engine: LocalEngine) -> None:
        """Return when nothing scatters into the engine's memory any more."""
        await self._reader.copies_done(engine)

    async def quiesce(self, engine: LocalEngine) -> None:
        """Return when no transfer can write into the engine's memory any more."""
        await self._reader.reads_done(engine)

    def start_draining(self) -> None:
        """No new fetches; those that are live go on."""
        self._driver.on_settled = self._check_idle
        self._dispatch(ev.DrainStarted())

    async def drained(self) -> None:
        """Return when the last fetch has ended and its blocks are free."""
        await self._idle.wait()
        await self._delegates.drained()

    def stop(self) -> None:
        """Fail what is left."""
        self._dispatch(ev.Stopped())
        self._driver.stop()
        self._delegates.stop()
        self._reader.stop()

    def counts(self) -> dict[str, int]:
        """What the table holds."""
        draining = self._table.num_in(FetchState.DRAINING)
        return {
            "fetches": len(self._table.live),
            "queued_fetches": self._table.num_in(FetchState.QUEUED),
            "draining_fetches": draining,
            "delegated_reads": self._delegates.num_reads,
            "slots": self._reader.num_slots_in_use,
        }

    @property
    def routes(self) -> RouteBook:
        """The routes to prefill engines."""
        return self._leases.routes

    def sharing(self) -> Sharing:
        """What of other agents is mapped here."""
        return self._leases.routes.borrower.sharing()

    def silent_peers(self) -> dict[str, float]:
        """The agents that do not answer, and in how many seconds each is tried again."""
        return self._leases.peers.silent()

    def key_of(self, endpoint: str) -> str:
        """The key of an agent that does not answer, as its tickets have it."""
        return self._leases.peers.key_of_silent(endpoint)

    def view(self, endpoint: str) -> PeerView:
        """Whether it is listed and warm, and what came of handshakes with it."""
        routes, listed = self._leases.routes, self._warm.view(endpoint)
        return replace(
            listed,
            num_routes=routes.num_from(endpoint),
            problem=listed.problem or routes.refusals.get(endpoint, ""),
        )

    def story(self, asked: Status) -> list[str]:
        """What happened to a fetch, and to its reads: those here, and those for another agent."""
        found = self._table.called(asked.fetch_id)
        lines = [line for fetch in found for line in fetch.story.lines()]
        reads = [line for fetch in found for line in self._reader.story(fetch.key)]
        reads += self._delegates.story(asked.fetch_id)
        return lines + [f"read  {line}" for line in reads]

    def recent(self, number: int) -> list[Callable[[], list[Span]]]:
        """The newest fetches."""
        return self._spans.recent(number)

    def spans(self, asked: Trace) -> Remembered:
        """What is remembered of fetches, and of reads for another agent."""
        return self._spans.remembered(asked)

    def _start_fetch(self, fetch: StartFetch, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        shown = self._tickets.admit(fetch, engine.engine_id)
        meets = shown if isinstance(shown, Rendezvous) else None
        ticket = shown.unknown_ticket() if isinstance(shown, Rendezvous) else shown
        if fetch.first_token > fetch.num_tokens:
            raise LocalError(
                f"first_token {fetch.first_token} is behind num_tokens {fetch.num_tokens}",
                field="first_token",
            )
        check_tables(engine, fetch.tables, fetch.first_token, fetch.num_tokens)
        boot = ticket.agent_boot if meets is None else None
        answers = self._leases.peers.answers(PeerAddress.of(ticket), boot)
        requested = ev.Requested(
            fetch_id=ev.fetch_key(engine.engine_id, fetch.fetch_id),
            engine_id=engine.engine_id,
            ticket=ticket,
            first_token=fetch.first_token,
            num_tokens=fetch.num_tokens,
            tables=fetch.tables,
            timeout_s=fetch.timeout_s or self._config.fetch_timeout_s,
            has_state=any(group.state for group in engine.spec.groups),
            zero_tail=fetch.zero_tail,
            chunk_tokens=fetch.chunk_tokens,
            reply_to=call,
            meets=meets,
            prompt_digest=fetch.prompt_digest,
            priority=fetch.priority,
            traceparent=fetch.traceparent,
            asked_s=fetch.asked_s,
            wanted_s=fetch.wanted_s,
            name=fetch.fetch_id,
        )
        route = self._leases.routes.find(ticket, engine) if meets is None else None
        if route is not None and self._reader.is_ready(route, requested):
            may_read = self._config.optimistic and answers  # else READs would stall, and blocks
            ahead = ahead_of(requested, route, self._reader) if may_read else None
            requested = replace(requested, route=route, ahead=ahead)
        self._dispatch(requested)

    def _cancel_fetch(self, cancel: CancelFetch, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        key = ev.fetch_key(engine.engine_id, cancel.fetch_id)
        if self._table.find(key) is None:
            raise LocalError(f"no fetch '{cancel.fetch_id}'", code=ErrorCode.FETCH_UNKNOWN)
        self._dispatch(ev.CancelRequested(key, call, cancel.release_offer))

    async def _prepare(self, route: Route, requested: ev.Requested) -> None:
        await self._reader.prepare(route, requested)

    def _read_chunk(self, command: ev.ReadChunk) -> None:
        """Read here, and have the agents with other ranks of the engine read."""
        fetch = self._leases.active[command.fetch_id]
        requested, route = fetch.requested, fetch.route
        try:
            if route is None:
                raise LocalError("the fetch has no route", code=ErrorCode.INTERNAL)
            chunk = make_chunk(
                route,
                offer_id=requested.ticket.offer_id,
                epoch=command.epoch,
                token=command.token,
                source=command.tables,
                target=requested.tables,
                whole=(requested.first_token, requested.num_tokens),
                part=(command.start, command.stop),
                last=command.last,
                zero_tail=requested.zero_tail,
                replica_index=fetch.replica_index,
                deadline=fetch.deadline,
                secret=requested.ticket.secret,
                one_in=self._config.digest_one_in,
                priority=requested.priority,
            )
        except KVBusError as error:
            self._dispatch(ev.ChunkRead(command.fetch_id, 0, error))
            return
        remote_legs = [self._remote_leg(fetch, command, other) for other in fetch.engine.others]
        self._reader.start(command.fetch_id, chunk, self._on_chunk_ended, remote_legs=remote_legs)

    def _remote_leg(self, fetch: ActiveFetch, command: ev.ReadChunk, other: AgentRanks) -> Leg:
        requested = fetch.requested
        question = Delegate(
            fetch_id=requested.name,
            engine_id=fetch.engine.engine_id,
            access=other.access,
            ranks=other.ranks,
            ticket=requested.ticket.to_json(),
            memory_ids=fetch.route.memory_ids if fetch.route else (),
            epoch=command.epoch,
            token=command.token,
            source=dict(command.tables),
            target=dict(requested.tables),
            first_token=requested.first_token,
            num_tokens=requested.num_tokens,
            start=command.start,
            stop=command.stop,
            last=command.last,
            zero_tail=requested.zero_tail,
            timeout_s=max(1e-3, fetch.deadline - self._agent.loop.time()),
            one_in=self._config.digest_one_in,
            priority=requested.priority,
        )
        return Leg((Stage.DELEGATE,), DelegateJob(other, question, fetch.peers))

    def _fail_fetch(self, key: Hashable, error: KVBusError) -> None:
        self._dispatch(ev.StepFailed(str(key), error))

    def _on_chunk_ended(self, ended: ChunkEnded) -> None:
        self._dispatch(ev.ChunkRead(str(ended.key), ended.num_bytes, ended.error, ended.path))

    def _stop_read(self, command: ev.StopRead) -> None:
        error = LocalError("the read was aborted", code=ErrorCode.CANCELLED)
        self._reader.stop_read(command.fetch_id, error)

    def _report_landed(self, command: ev.ReportLanded) -> None:
        name = self._name_of(command.fetch_id)
        self._notify(command.fetch_id, Landed(fetch_id=name, num_tokens=command.num_tokens))

    def _name_of(self, fetch_id: str) -> str:
        """What the engine calls the fetch."""
        fetch = self._table.find(fetch_id)
        return "" if fetch is None else fetch.requested.name

    def _report_fetched(self, fetched: ev.ReportFetched) -> None:
        """The engine first: it waits, while the log and the counters do not."""
        code = fetched.error.code.value if fetched.error else ""
        fetch = self._leases.active.get(fetched.fetch_id)
        name = self._name_of(fetched.fetch_id)
        self._notify(
            fetched.fetch_id,
            Fetched(
                fetch_id=name,
                request_id=fetched.request_id,
                outcome=fetched.outcome,
                stage=fetched.stage,
                blocks_free=fetched.blocks_free,
                code=code,
                message=fetched.error.message if fetched.error else "",
                num_bytes=fetched.num_bytes,
                path=fetched.path,
                stages_s=fetched.stages_s,
                whole_blocks=fetch is not None and fetch.fills_blocks,
            ),
            is_last=fetched.blocks_free,
        )
        if fetch is not None and fetched.error is None:
            self._tickets.complete(fetch.requested.ticket)
            self._costs.observe(fetched, fetch)
        if fetched.blocks_free:
            self._leases.end(fetched.fetch_id)
            self._export(fetched.fetch_id)
        else:
            self._leases.drain(fetched.fetch_id)
        total_s = self._metrics.observe(fetched)
        self._log_fetched(fetched, name, total_s)
        event = FetchEvent(fetch_id=name, request_id=fetched.request_id, code=code)
        self._agent.publisher.publish(f"fetch.{fetched.outcome}", event)

    def _report_blocks_freed(self, freed: ev.ReportBlocksFreed) -> None:
        name = self._name_of(freed.fetch_id)
        log.info("blocks.freed", fetch_id=name)
        self._notify(freed.fetch_id, BlocksFreed(fetch_id=name), is_last=True)
        self._leases.end(freed.fetch_id)
        self._export(freed.fetch_id)

    def _export(self, fetch_id: str) -> None:
        """Its spans go to the collector, if there is one."""
        fetch = self._table.find(fetch_id)
        if self._agent.outbox is not None and fetch is not None:
            asked, ticket = fetch.requested, fetch.requested.ticket
            trace_name = asked.name if asked.meets else ticket.offer_id  # it may never have met one
            traces = asked.traceparent, ticket.traceparent
            self._agent.outbox.put(self._spans.later(fetch), trace_name, *traces)

    def _notify(
        self, fetch_id: str, notice: Landed | Fetched | BlocksFreed, *, is_last: bool = False
    ) -> None:
        """Tell the engine that asked; one that came back under its id does not know the fetch."""
        fetch = self._leases.active.get(fetch_id)
        if fetch is not None:
            on_told = partial(self._note_told, fetch_id) if is_last else None
            fetch.engine.notify(notice, on_told)

    def _note_told(self, fetch_id: str, told_at: float) -> None:
        self._table.note_told(fetch_id, told_at, self._driver.now)

    def _log_fetched(self, fetched: ev.ReportFetched, name: str, total_s: float) -> None:
        """The canonical line of a handoff."""
        error, stages = fetched.error, fetched.stages_s
        if error is not None:
            story = self.story(Status(fetch_id=name))
            log.debug("handoff.story", fetch_id=name, story=story)
        failure: dict[str, str | bool] = {}
        if error is not None:
            failure |= {"code": error.code.value, "reason": error.message}
        if fetched.undecided:
            failure["undecided"] = True
        level = log.info if error is None else log.warning
        level(
            f"handoff.{fetched.outcome}",
            request_id=fetched.request_id,
            fetch_id=name,
            engine_id=fetched.engine_id,
            stage=fetched.stage,
            num_bytes=fetched.num_bytes,
            path=fetched.path,
            ahead=fetched.ahead,
            leased=fetched.leased,
            blocks_free=fetched.blocks_free,
            total_ms=round(total_s * 1e3, 3),
            meeting_ms=round(stages.meeting * 1e3, 3),
            resolving_ms=round(stages.resolving * 1e3, 3),
            queued_ms=round(stages.queued * 1e3, 3),
            claiming_ms=round(stages.claiming * 1e3, 3),
            waiting_ms=round(stages.waiting * 1e3, 3),
            reading_ms=round(stages.reading * 1e3, 3),
            confirming_ms=round(stages.confirming * 1e3, 3),
            **failure,
        )

    def _check_idle(self) -> None:
        if not self._table.live:
            self._idle.set()

    def _readings(self) -> dict[str, float]:
        stats = self._agent.transport.stats()
        return {
            **self.counts(),
            "ended_bytes": self._table.retired_bytes,
            "quarantined_blocks": self._table.num_quarantined_blocks(),
            "peers": len(self._leases.peers),
            "silent_peers": len(self._leases.peers.silent()),
            "silent_peer_refusals": self._leases.peers.num_refused,
            "listed_peers": self._warm.num_listed,
            "warm_peers": self._warm.num_warm,
            "engines": len(self._agent.engines.engines),
            "copies": self._reader.num_copies,
            "outstanding_handles": stats.outstanding_handles,
            "outstanding_bytes": stats.outstanding_bytes,
            "unreleased_handles": stats.unreleased_handles,
            "recycled_transports": stats.retired_agents,
            "recycled_timestamp_seconds": stats.retired_at,
            "registered_bytes": stats.registered_bytes,
            "mapped_bytes": self._leases.routes.borrower.num_bytes,
        }
