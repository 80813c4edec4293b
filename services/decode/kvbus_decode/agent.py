"""The decode agent: requests become events of the fetch table, its commands become work.

Refuses to hold any state of a fetch itself, but for what a command needs to be carried out.
"""

import anyio
import structlog

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.process.service import Agent
from kvbus.bus import Call, Handlers
from kvbus.protocol.engine import BlocksFreed, CancelFetch, Fetched, Landed, StartFetch
from kvbus.protocol.peer import FetchEvent
from kvbus.protocol.remote_ranks import AbortDelegate, Delegate
from kvbus.table.driver import Driver
from kvbus_decode.active import ActiveFetches
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import FetchState
from kvbus_decode.fetch.table import FetchTable
from kvbus_decode.metrics import READINGS, DecodeMetrics
from kvbus_decode.peer.lease_client import LeaseClient
from kvbus_decode.read.assisting import Assistant
from kvbus_decode.read.pieces import PieceReader
from kvbus_decode.read.reading import Reader
from kvbus_decode.read.siblings import Siblings
from kvbus_decode.requests import fetch_event

log = structlog.get_logger()


class DecodeService:
    """Everything of a decode agent that is not shared with the prefill agent."""

    def __init__(self, agent: Agent, config: DecodeConfig) -> None:
        self._agent, self._config = agent, config
        self._table = FetchTable(limits=config.fetch_limits)
        self._driver: Driver[ev.Event, ev.Command] = Driver(
            self._table,
            self._execute,
            deadline_passed=ev.DeadlinePassed(),
            on_settled=self._on_settled,
            loop=agent.loop,
        )
        self._works = ActiveFetches()
        self._leases = LeaseClient(agent, config, self._works, self._driver.dispatch)
        self._pieces = PieceReader(agent, config)
        peers, routes = self._leases.peers, self._leases.routes
        self._assistant = Assistant(agent, peers, routes, self._pieces)
        self._siblings = Siblings(agent, peers)
        self._reader = Reader(self._pieces, self._siblings, self._works, self._driver.dispatch)
        self._idle = anyio.Event()
        self._metrics = DecodeMetrics(agent.metrics)
        agent.metrics.add_readings(self._readings, READINGS)

    def engine_handlers(self) -> Handlers:
        """A fetch, or its cancellation."""
        return {StartFetch: self._start_fetch, CancelFetch: self._cancel_fetch}

    def peer_handlers(self) -> Handlers:
        """Another decode agent, with the control session of an engine of ours, asks for help."""
        return {Delegate: self._assistant.assist, AbortDelegate: self._assistant.abort}

    def on_engine_lost(self, engine: LocalEngine) -> None:
        """Its fetches end; nobody is there to be told."""
        self._driver.dispatch(ev.EngineLost(engine.engine_id))
        self._pieces.abort_all(engine)
        self._siblings.forget(engine)
        self._leases.routes.forget_engine(engine)

    async def copied(self, engine: LocalEngine) -> None:
        """Return when nothing scatters into the engine's memory any more."""
        await self._pieces.copies_done(engine)

    async def quiesce(self, engine: LocalEngine) -> None:
        """Return when no transfer can write into the engine's memory any more."""
        await self._pieces.reads_done(engine)

    def start_draining(self) -> None:
        """No new fetches; those that are live go on."""
        self._driver.dispatch(ev.DrainStarted())

    async def drained(self) -> None:
        """Return when the last fetch has ended and its blocks are free."""
        await self._idle.wait()
        await self._assistant.drained()

    def stop(self) -> None:
        """Fail what is left."""
        self._driver.dispatch(ev.Stopped())
        self._driver.stop()
        self._assistant.stop()

    def counts(self) -> dict[str, int]:
        """What the table holds."""
        draining = self._table.num_in(FetchState.DRAINING)
        return {
            "fetches": len(self._table.fetches),
            "draining_fetches": draining,
            "delegated_reads": self._assistant.num_reads,
            "slots": self._pieces.num_slots_in_use,
        }

    def _start_fetch(self, fetch: StartFetch, call: Call) -> None:
        engine, timeout_s = self._agent.engines.engine_of(call), self._config.fetch_timeout_s
        self._driver.dispatch(fetch_event(engine, fetch, timeout_s=timeout_s, reply_to=call))

    def _cancel_fetch(self, cancel: CancelFetch, call: Call) -> None:
        self._agent.engines.engine_of(call)  # refuses who has none
        self._driver.dispatch(ev.CancelRequested(cancel.fetch_id, call))

    def _execute(self, command: ev.Command) -> None:
        leases, reader = self._leases, self._reader
        match command:
            case ev.SendReply(reply_to=Call() as call, body=body):
                call.reply(body)
            case ev.Refuse(reply_to=Call() as call, error=error):
                call.refuse(error)
            case ev.ResolvePeer():
                leases.resolve(command)
            case ev.SendClaim():
                leases.claim(command)
            case ev.SendRenew():
                leases.renew(command)
            case ev.StartRead():
                reader.start_read(command)
            case ev.AbortRead():
                reader.abort_read(command)
            case ev.SendConfirm():
                leases.confirm(command)
            case ev.SendRelease():
                leases.give_back(command)
            case ev.ReportLanded(fetch_id, num_tokens):
                self._notify(Landed(fetch_id=fetch_id, num_tokens=num_tokens))
            case ev.ReportFetched():
                self._report_fetched(command)
            case ev.ReportBlocksFreed():
                self._report_blocks_freed(command)

    def _report_fetched(self, fetched: ev.ReportFetched) -> None:
        """The engine first: it waits, while the log and the counters do not."""
        code = fetched.error.code.value if fetched.error else ""
        self._notify(
            Fetched(
                fetch_id=fetched.fetch_id,
                request_id=fetched.request_id,
                outcome=fetched.outcome,
                stage=fetched.stage,
                blocks_free=fetched.blocks_free,
                code=code,
                message=fetched.error.message if fetched.error else "",
                num_bytes=fetched.num_bytes,
                path=fetched.path,
                stages_s=fetched.stages_s,
            )
        )
        if fetched.blocks_free:
            self._leases.end(fetched.fetch_id)
        total_s = self._metrics.observe(fetched)
        self._log_fetched(fetched, total_s)
        event = FetchEvent(fetch_id=fetched.fetch_id, request_id=fetched.request_id, code=code)
        self._agent.publisher.publish(f"fetch.{fetched.outcome}", event)

    def _report_blocks_freed(self, freed: ev.ReportBlocksFreed) -> None:
        log.info("blocks.freed", fetch_id=freed.fetch_id)
        self._notify(BlocksFreed(fetch_id=freed.fetch_id))
        self._leases.end(freed.fetch_id)

    def _notify(self, notice: Landed | Fetched | BlocksFreed) -> None:
        """Tell the engine that asked; one that came back under its id does not know the fetch."""
        work = self._works.find(notice.fetch_id)
        if work is not None:
            work.engine.notify(notice)

    def _log_fetched(self, fetched: ev.ReportFetched, total_s: float) -> None:
        """The canonical line of a handoff."""
        error, stages = fetched.error, fetched.stages_s
        failure = {"code": error.code.value, "reason": error.message} if error else {}
        level = log.info if error is None else log.warning
        level(
            f"handoff.{fetched.outcome}",
            request_id=fetched.request_id,
            fetch_id=fetched.fetch_id,
            engine_id=fetched.engine_id,
            stage=fetched.stage,
            num_bytes=fetched.num_bytes,
            path=fetched.path,
            blocks_free=fetched.blocks_free,
            total_ms=round(total_s * 1e3, 3),
            resolving_ms=round(stages.resolving * 1e3, 3),
            claiming_ms=round(stages.claiming * 1e3, 3),
            waiting_ms=round(stages.waiting * 1e3, 3),
            reading_ms=round(stages.reading * 1e3, 3),
            confirming_ms=round(stages.confirming * 1e3, 3),
            **failure,
        )

    def _on_settled(self) -> None:
        if self._table.draining and not self._table.fetches:
            self._idle.set()

    def _readings(self) -> dict[str, float]:
        stats = self._agent.transport.stats()
        return {
            **self.counts(),
            "quarantined_blocks": self._table.num_quarantined_blocks(),
            "peers": len(self._leases.peers),
            "engines": len(self._agent.engines.engines),
            "outstanding_handles": stats.outstanding_handles,
            "outstanding_bytes": stats.outstanding_bytes,
            "unreleased_handles": stats.unreleased_handles,
            "registered_bytes": stats.registered_bytes,
        }
