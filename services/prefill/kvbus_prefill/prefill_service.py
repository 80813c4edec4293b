"""Prefill agent: requests become events of the offer table, its commands become replies."""

import time
from collections.abc import Mapping
from functools import partial

import anyio
import structlog

from kvbus.agent.access import load_ticket_keys
from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.service import Agent, Service
from kvbus.bus import Call, Handlers, Quota, new_secret
from kvbus.data.client import ProgressToken
from kvbus.errors import ErrorCode, LocalError
from kvbus.geometry import BlockTable, check_offered
from kvbus.protocol.commit_cell import CommitCell
from kvbus.protocol.engine import (
    ExtendOffer,
    MakeOffer,
    Park,
    ParkOffer,
    ReportBlocks,
    Republished,
    SealOffer,
    WithdrawOffer,
)
from kvbus.protocol.message import Empty, Message
from kvbus.protocol.peer import (
    Acquire,
    AwaitOffer,
    CancelRequest,
    Commit,
    CommitQuery,
    Decline,
    Handshake,
    KeepOffers,
    PeerWithdraw,
    Release,
    Renew,
    ReportCommits,
)
from kvbus.protocol.ticket import Ticket, packed_tables
from kvbus.protocol.tools import (
    LeaseEvent,
    OfferEvent,
    OfferParked,
    PoolStatus,
    Sharing,
    known_trace,
)
from kvbus.table.events import EngineLost, Stopped
from kvbus.table.table import Driver
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.gather import Packing, check_read_from
from kvbus_prefill.handshakes import Handshakes
from kvbus_prefill.lending import MemoryLender
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.table import OfferTable
from kvbus_prefill.offer_reports import READINGS, OfferHistories, PrefillMetrics
from kvbus_prefill.parking import Parking
from kvbus_prefill.pool import check_pool_fits

log = structlog.get_logger()

CELLS_CHECKED_EVERY_S = 1.0
"""Longest time that blocks stay pinned after a commit whose report was lost."""


class PrefillService(Service):
    def __init__(self, agent: Agent, config: PrefillConfig) -> None:
        self._config = config
        self._table = OfferTable(limits=config.offer_limits)
        self._metrics = PrefillMetrics(agent.metrics)
        self._packing = Packing(agent, config, self._metrics, self._table)
        histories = OfferHistories(self._table, self._packing.slots)
        driver: Driver[ev.Event] = Driver(self._table, agent.loop)
        super().__init__(agent, self._table, driver, histories)
        self._driver.commands |= {
            ev.BeginLease: self._begin_lease,
            ev.EndLease: self._end_lease,
            ev.ReportReleased: self._report_released,
            ev.Publish: lambda event: agent.publisher.publish(event.op, event.body),
        }
        self._parking = Parking(agent, config, self._table, driver.dispatch, self._end_pool)
        self._driver.commands |= {
            ev.ParkSoon: self._parking.park,
            ev.FreePooled: self._parking.free,
            ev.ReportParked: self._report_parked,
        }
        self._ticket_keys = load_ticket_keys(config.ticket_keys)
        self._tokens: dict[tuple[str, int], ProgressToken] = {}
        self.lender = MemoryLender(agent, config, self._close_cells)
        self._handshakes = Handshakes(agent, config, self._table, self.lender)
        agent.metrics.add_readings(self._readings, READINGS)

    async def start(self) -> None:
        check_pool_fits(self._agent, self._config.park_bytes)
        self._driver.dispatch(ev.EnginesGone())
        await self.lender.open()
        self._agent.tasks.start_soon(self._check_cells)

    def engine_handlers(self) -> Handlers:
        return {
            MakeOffer: self._open_in_order,
            **dict.fromkeys((ExtendOffer, SealOffer, WithdrawOffer), self._change_in_order),
            ParkOffer: self._park_in_order,
            ReportBlocks: self._note_blocks,
            Republished: self._republished_in_order,
        }

    def peer_handlers(self) -> Handlers:
        about_offers = (Acquire, Release, Decline)
        return {
            Handshake: self._handshakes.answer,
            **dict.fromkeys(about_offers, self._forward),
            Renew: self._renew,
            Commit: self._commit,
            PeerWithdraw: self._withdraw,
            ReportCommits: self._end_committed,
            CommitQuery: self._answer_committed,
            KeepOffers: self._keep,
            AwaitOffer: Quota(self._await_offer, self._config.max_handoffs),
            CancelRequest: _cancel_request,
            **self._packing.handlers(self.ordering),
        }

    def on_engine_ready(self, engine: LocalEngine) -> None:
        self._driver.dispatch(ev.EngineReady())
        self._parking.on_engine_ready(engine)

    def on_engine_lost(self, engine: LocalEngine) -> None:
        self.ordering.end_engine(engine)
        self._packing.end_engine(engine)
        self._driver.dispatch(EngineLost(engine.engine_id))
        self._parking.on_engine_lost(engine)
        if not any(other.ready for other in self._agent.engines.engines.values()):
            self._driver.dispatch(ev.EnginesGone())
        self.lender.end_engine(engine)

    def _end_pool(self, pool: LocalEngine) -> None:
        self._packing.end_engine(pool)
        self.lender.end_engine(pool)

    def check_memory(self) -> None:
        self._parking.check_memory()

    def pools(self) -> dict[str, PoolStatus]:
        return self._parking.statuses()

    def _close_cells(self, engine: LocalEngine) -> None:
        self._driver.dispatch(ev.CellsRevoked(engine.engine_id))

    async def _check_cells(self) -> None:
        while True:
            await anyio.sleep(CELLS_CHECKED_EVERY_S)
            # In a callback, the loop logs an error, and this task goes on.
            self._agent.loop.call_soon(self._driver.dispatch, ev.CellsChecked())

    async def quiesce(self, engine: LocalEngine) -> None:
        """Wait ``late_read_s`` for late reads, which their agents abort after their lease."""
        log.debug("engine.retiring", engine_id=engine.engine_id)
        await anyio.sleep(self._config.late_read_s)

    def stop(self) -> None:
        self.ordering.close()
        self._packing.stop()
        self._driver.dispatch(Stopped())
        self._driver.stop()
        self._parking.stop()

    def counts(self) -> dict[str, int]:
        slots = self._packing.slots
        return {
            "offers": self._table.num_offers,
            "parked_offers": self._table.num_parked,
            "leases": self._table.num_leases,
            "packs": slots.num_waiting,
            "slots": slots.num_slots_in_use,
            "waiting_requests": len(self.ordering),
        }

    def sharing(self) -> Sharing:
        return self.lender.sharing()

    def _forward(self, message: Message, call: Call) -> None:
        key = call.session.key
        fresh = new_secret() if isinstance(message, Acquire | AwaitOffer | Decline) else ""
        self._driver.dispatch(
            ev.RequestReceived(message=message, reply_to=call, holder=key, fresh=fresh)
        )

    # Memory that an engine has truncated reads as zeros in both data processes. A commit may arrive
    # before the data process reports the truncation. The file is shorter before the first zero is
    # read, so this agent checks the files for each commit.
    def _commit(self, commit: Commit, call: Call) -> None:
        if not self._table.is_committed(commit, call.session.key):
            check_read_from(self._agent.data, commit.nixl_agent)
        offer = self._table.live.get(commit.offer_id)
        if offer is not None and offer.pooled is None:
            self._agent.engines.end_if_left(offer.engine_id)
            self._agent.engines.find_cuts(offer.engine_id)
        self._forward(commit, call)

    def _renew(self, renew: Renew, call: Call) -> None:
        check_read_from(self._agent.data, renew.nixl_agent)
        self._forward(renew, call)

    def _end_committed(self, report: ReportCommits, call: Call) -> None:
        for offer_id, token in report.tokens.items():
            self._driver.dispatch(ev.CellCommitted(offer_id, token))
        call.reply(Empty())

    def _answer_committed(self, request: CommitQuery, call: Call) -> None:
        awaits = self._agent.engines.awaits_offers_of(request.engine_id)
        if awaits and self._table.may_be_published(request):
            raise _not_ready()
        self._forward(request, call)

    def _keep(self, message: KeepOffers, call: Call) -> None:
        may_come = self._agent.engines.awaits_offers_of("")
        self._driver.dispatch(ev.KeepRequested(message, call, call.session.tenant, may_come))

    def _republished_in_order(self, message: Republished, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        end = partial(self._end_republishing, message, call)
        self.ordering.submit_last(engine, call, end)

    def _end_republishing(self, message: Republished, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        for ended in message.ended:
            self._driver.dispatch(ev.Restored(engine.engine_id, ended))
        self._agent.engines.see_republished(engine)
        call.reply(Empty())

    def _withdraw(self, message: PeerWithdraw, call: Call) -> None:
        awaits = self._agent.engines.awaits_offers_of("")
        if awaits and self._table.find(message.offer_id) is None:
            raise _not_ready()
        self._forward(message, call)

    def _await_offer(self, wanted: AwaitOffer, call: Call) -> None:
        left = ev.Abandoned(transfer_id=wanted.transfer_id, reply_to=call)
        call.on_end = partial(self._driver.dispatch, left)
        self._forward(wanted, call)

    def _open_in_order(self, offer: MakeOffer, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        about, make = offer.offer_id or call, partial(self._open, offer, call)
        self.ordering.submit(engine, about, call, make, after=offer.after)

    def _change_in_order(
        self, message: ExtendOffer | SealOffer | WithdrawOffer, call: Call
    ) -> None:
        engine = self._agent.engines.engine_of(call)
        after = 0 if isinstance(message, WithdrawOffer) else message.after
        change = partial(self._change, message, call)
        self.ordering.submit(engine, message.offer_id, call, change, after=after)

    def _open(self, offer: MakeOffer, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        _check_tables(engine, offer.tables, offer.num_tokens, sealed=offer.sealed)
        identity, max_blocks = self._agent.identity, self._config.ticket_blocks
        may_have_cell = offer.cell and offer.sealed and offer.readers == 1
        cells = engine.cells if may_have_cell else None
        ticket = Ticket(
            agent_id=identity.agent_id,
            agent_boot=identity.agent_boot,
            endpoint=identity.peer_endpoint,
            engine_id=engine.engine_id,
            engine_instance=engine.instance,
            offer_id=offer.offer_id or new_secret(),
            request_id=offer.request_id,
            num_tokens=offer.num_tokens,
            secret=offer.secret or new_secret(),
            server_key=identity.server_key,
            audience=offer.audience,
            prompt_digest=offer.prompt_digest,
            blocks=packed_tables(offer.tables, max_blocks=max_blocks) if offer.sealed else "",
            traceparent=known_trace(offer.traceparent),
            cell=offer.cell if cells else 0,
        )
        if self._ticket_keys is not None:
            lifetime_s = self._config.ticket_lifetime_s
            ticket = self._ticket_keys.sign(ticket, now_s=time.time(), lifetime_s=lifetime_s)
        # The engine may append blocks to a ticket itself, unless the site signs tickets.
        may_name = not offer.sealed and self._ticket_keys is None
        self._driver.dispatch(
            ev.Opened(
                message=offer,
                reply_to=call,
                ticket=ticket,
                ttl_s=offer.ttl_s or self._config.offer_ttl_s,
                cell=CommitCell(cells.swap, ticket) if cells else None,
                ticket_blocks=max_blocks if may_name else 0,
            )
        )
        if offer.park is Park.ALWAYS:
            self._parking.warn_if_never(engine)
        self._parking.note(ticket.offer_id)

    def _change(self, message: ExtendOffer | SealOffer | WithdrawOffer, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        offer = self._table.live.get(message.offer_id)
        if offer is not None and offer.engine_id == engine.engine_id:
            match message:
                case ExtendOffer(num_tokens=num_tokens, tables=more):
                    _check_tables(engine, offer.tables_with(more), num_tokens, sealed=False)
                case SealOffer():
                    _check_tables(engine, offer.tables, offer.num_tokens, sealed=True)
        self._dispatch_change(message, call, engine)
        self._parking.note(message.offer_id)

    def _park_in_order(self, message: ParkOffer, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        self._parking.check_may_park(engine)
        park = partial(self._dispatch_change, message, call, engine)
        self.ordering.submit(engine, message.offer_id, call, park)

    def _dispatch_change(self, message: Message, call: Call, engine: LocalEngine) -> None:
        changed = ev.RequestReceived(message=message, reply_to=call, engine_id=engine.engine_id)
        self._driver.dispatch(changed)

    def _note_blocks(self, report: ReportBlocks, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        self._parking.report_blocks(engine, short=report.short)
        call.reply(Empty())

    def _begin_lease(self, command: ev.BeginLease) -> None:
        """Drive progress here, which connection set-up and READs need."""
        lease = command.offer_id, command.epoch
        self._tokens[lease] = self._agent.data.drive_progress()
        self._agent.publisher.publish("lease.granted", LeaseEvent(*lease))

    def _end_lease(self, command: ev.EndLease) -> None:
        """End a lease; progress continues for late reads if it expired or was revoked."""
        lease, reason = (command.offer_id, command.epoch), command.reason
        self._metrics.leases.values[reason,] += 1
        self._packing.end_lease(*lease, command.code)
        self._agent.publisher.publish(f"lease.{reason}", LeaseEvent(*lease))
        token = self._tokens.pop(lease)
        self._parking.note(command.offer_id)
        if reason == "ended":
            token.close()
            return
        log.warning(f"lease.{reason}", offer_id=command.offer_id, epoch=command.epoch)
        self._agent.loop.call_later(self._config.late_read_s, token.close)

    def _report_released(self, report: ev.ReportReleased) -> None:
        """Notify the engine before logging: it waits for its blocks."""
        released = report.released
        if not report.was_parked:
            self._notify(report.engine_id, released)
        self._parking.forget(released.offer_id)
        event = OfferEvent(released.offer_id, report.num_tokens, released.outcome.value)
        self._agent.publisher.publish("offer.released", event)
        sender = self._agent.sender
        if sender is not None and (offer := self._table.find(released.offer_id)) is not None:
            sender.put(self.histories.later(offer), offer.offer_id, offer.traceparent)
        lived_s = self._agent.loop.time() - report.opened_at
        self._metrics.offers.values[released.outcome.value,] += 1
        if report.was_parked:
            self._metrics.parked.values[released.outcome.value,] += 1
        self._metrics.offer_life_s.add({"": lived_s})
        log.info(
            "offer.released",
            request_id=released.request_id,
            offer_id=released.offer_id,
            engine_id=report.engine_id,
            outcome=released.outcome.value,
            num_tokens=report.num_tokens,
            lived_s=round(lived_s, 6),
        )

    def _report_parked(self, report: ev.ReportParked) -> None:
        released, pooled = report.released, report.pooled
        self._notify(report.engine_id, released)
        event = OfferParked(released.offer_id, **pooled.names)
        self._agent.publisher.publish("offer.parked", event)
        sealed_s = self._agent.loop.time() - report.sealed_at
        self._metrics.parked_bytes.values[()] += pooled.num_bytes
        self._metrics.park_s.add({"": sealed_s})
        log.info(
            "offer.parked",
            request_id=released.request_id,
            offer_id=released.offer_id,
            engine_id=report.engine_id,
            num_bytes=pooled.num_bytes,
            sealed_s=round(sealed_s, 6),
        )

    def _notify(self, engine_id: str, notice: Message) -> None:
        engine = self._agent.engines.engines.get(engine_id)
        if engine is not None:
            engine.notify(notice)

    def _readings(self) -> dict[str, float]:
        return {
            **self.counts(),
            "awaited_offers": self._table.num_waiting,
            "pool_bytes": self._parking.size_bytes,
            "pool_used_bytes": self._parking.num_bytes,
            "held_offers": self._table.num_held,
            "ended_bytes": self._table.retired_bytes,
            "engines": len(self._agent.engines.engines),
            "progress_tokens": self._agent.data.num_progress,
            "memory_readers": self.lender.num_readers,
        }


def _not_ready() -> LocalError:
    return LocalError(
        "engines of this agent have still to publish their offers again",
        code=ErrorCode.ENGINE_NOT_READY,
    )


def _cancel_request(cancel: CancelRequest, call: Call) -> None:
    waiting = call.session.pending.get(cancel.request_id)
    if waiting is not None and waiting is not call:
        waiting.end(LocalError("it was cancelled", code=ErrorCode.CANCELLED))
    call.reply(Empty())


def _check_tables(
    engine: LocalEngine, tables: Mapping[str, BlockTable], num_tokens: int, *, sealed: bool
) -> None:
    num_blocks = engine.num_blocks
    check_offered(engine.spec, tables, num_tokens, sealed=sealed, num_blocks=num_blocks)
