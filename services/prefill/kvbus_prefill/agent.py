"""The prefill agent: requests become events of the offer table, its commands become replies.

Refuses to hold any state of an offer itself.
"""

import time
import uuid
from collections.abc import Callable
from functools import partial

import anyio
import structlog

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.process.service import Agent
from kvbus.agent.process.ticket_keys import load_ticket_keys
from kvbus.bus import Call, Handlers, Shared, new_secret
from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol.cost import Cost, Predicted
from kvbus.protocol.digests import Digest
from kvbus.protocol.engine import ExtendOffer, MakeOffer, Released, SealOffer, WithdrawOffer
from kvbus.protocol.mapped import Sharing
from kvbus.protocol.peer import (
    Claim,
    Confirm,
    Handshake,
    PeerWithdraw,
    Release,
    Renew,
    Status,
    Take,
)
from kvbus.protocol.peer_view import PeerView
from kvbus.protocol.rendezvous import Forgo, Meet
from kvbus.protocol.ticket import Ticket, packed_tables
from kvbus.protocol.trace import Remembered, Span, Trace
from kvbus.protocol.traceparent import known_trace
from kvbus.table import Driver
from kvbus.transport import ProgressToken
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.digests import DigestServer
from kvbus_prefill.gather import Packing
from kvbus_prefill.handshake import answer_handshake
from kvbus_prefill.lending import MemoryLender
from kvbus_prefill.meeting import events as meeting
from kvbus_prefill.meeting.table import MeetingTable
from kvbus_prefill.metrics import READINGS, PrefillMetrics
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferEntry
from kvbus_prefill.offer.table import OfferTable
from kvbus_prefill.requests import check_tables
from kvbus_prefill.spans import OfferSpans

log = structlog.get_logger()

MOST_DIGESTS = 256
"""Boxes that are digested, or wait for it, at a time: packs take turns with them."""


class PrefillService:
    """Everything of a prefill agent that is not shared with the decode agent."""

    def __init__(self, agent: Agent, config: PrefillConfig) -> None:
        self._agent, self._config = agent, config
        self._table = OfferTable(limits=config.offer_limits)
        self._driver: Driver[ev.Event] = Driver(self._table, agent.loop)
        self._driver.commands |= {
            ev.BeginLease: self._begin_lease,
            ev.EndLease: self._end_lease,
            ev.ReportReleased: self._report_released,
            ev.Publish: self._publish,
        }
        self._meetings = MeetingTable(config.meeting_limits)
        self._meeting_driver: Driver[meeting.Event] = Driver(self._meetings, agent.loop)
        self._meeting_driver.commands |= {meeting.Withdraw: self._withdraw_forgone}
        self._idle = anyio.Event()
        self._ticket_keys = load_ticket_keys(config.ticket_keys)
        self._tokens: dict[tuple[str, int], ProgressToken] = {}
        self._metrics = PrefillMetrics(agent.metrics)
        self._packing = Packing(agent, config, self._metrics, self._table)
        self._spans = OfferSpans(self._table, self._meetings, self._packing.boxes_of)
        self._digests = DigestServer(agent, self._packing, self._table)
        self._lender = MemoryLender(agent, config)
        agent.metrics.add_readings(self._readings, READINGS)

    async def start(self) -> None:
        """Open the memory socket; heartbeats say how much is read. Engines come later."""
        self._agent.publisher.count_reads = self._table.num_reads
        self._meeting_driver.dispatch(meeting.EnginesGone())
        await self._lender.open()

    def engine_handlers(self) -> Handlers:
        """An offer, or what becomes of one."""
        return {
            MakeOffer: self._open,
            ExtendOffer: self._extend,
            SealOffer: self._seal,
            WithdrawOffer: self._withdraw,
        }

    def peer_handlers(self) -> Handlers:
        """A reader shakes hands, uses a lease or wants boxes packed, or a router withdraws."""
        return {
            Handshake: self._shake_hands,
            Claim: self._claim,
            Renew: self._renew,
            Confirm: self._confirm,
            Take: self._take,
            Release: self._release,
            PeerWithdraw: self._withdraw_for_router,
            Meet: Shared(self._meet, self._config.max_offers),
            Forgo: self._forgo,
            **self._packing.handlers(),
            Digest: Shared(self._digests.digest, MOST_DIGESTS),
        }

    def on_engine_ready(self, engine: LocalEngine) -> None:
        """What its copies need is made ready, and its offers are waited for."""
        self._packing.copiers.prepare_for(engine)
        self._meeting_driver.dispatch(meeting.EngineReady())

    def on_engine_lost(self, engine: LocalEngine) -> None:
        """Its offers end; nobody is there to be told."""
        self._packing.end_engine(engine)
        self._digests.forget(engine)
        self._driver.dispatch(ev.EngineLost(engine.engine_id))
        if not any(other.ready for other in self._agent.engines.engines.values()):
            self._meeting_driver.dispatch(meeting.EnginesGone())
        self._lender.end_engine(engine)

    async def copied(self, engine: LocalEngine) -> None:
        """Return when nothing gathers from the engine's memory any more."""
        await self._packing.quiesce(engine)

    async def quiesce(self, engine: LocalEngine) -> None:
        """A reader may still be served late reads; its agent aborts them when its lease is over."""
        log.debug("engine.retiring", engine_id=engine.engine_id)
        await anyio.sleep(self._config.late_read_s)
        await self._packing.quiesce(engine)

    def start_draining(self) -> None:
        """No new offers; those that are live wait for their readers."""
        self._driver.on_settled = self._check_idle
        self._meeting_driver.dispatch(meeting.DrainStarted())
        self._driver.dispatch(ev.DrainStarted())

    async def drained(self) -> None:
        """Return when the last offer is released."""
        await self._idle.wait()

    def stop(self) -> None:
        """Withdraw what is left."""
        self._packing.stop()
        self._meeting_driver.dispatch(meeting.DrainStarted())
        self._meeting_driver.stop()
        self._driver.dispatch(ev.Stopped())
        self._driver.stop()

    def counts(self) -> dict[str, int]:
        """What the table holds."""
        table = self._table
        offers = {"offers": len(table.live), "leases": table.num_leases()}
        return offers | self._packing.counts()

    @property
    def lender(self) -> MemoryLender:
        """Its memory socket."""
        return self._lender

    def sharing(self) -> Sharing:
        """What its memory socket lends."""
        return self._lender.sharing()

    def silent_peers(self) -> dict[str, float]:
        """It asks nobody."""
        return {}

    def key_of(self, endpoint: str) -> str:
        """It asks nobody."""
        return ""

    def view(self, endpoint: str) -> PeerView:
        """It connects to nobody, and knows decode agents by what they ask alone."""
        return PeerView()

    def story(self, asked: Status) -> list[str]:
        """What happened to an offer."""
        return self._table.story(asked.offer_id)

    def cost(self, asked: Cost) -> Predicted:
        """Raises `LocalError`: who reads knows what it takes."""
        raise LocalError("only decode agents know what a handoff costs", code=ErrorCode.INVALID)

    def recent(self, number: int) -> list[Callable[[], list[Span]]]:
        """The newest offers."""
        return self._spans.recent(number)

    def spans(self, asked: Trace) -> Remembered:
        """What is remembered of offers."""
        return self._spans.remembered(asked)

    def _shake_hands(self, handshake: Handshake, call: Call) -> None:
        shake = partial(
            answer_handshake, self._agent, self._config, self._table, lender=self._lender
        )
        self._agent.tasks.start_soon(shake, handshake, call)

    def _claim(self, claim: Claim, call: Call) -> None:
        self._driver.dispatch(
            ev.Claimed(
                offer_id=claim.offer_id,
                secret=claim.secret,
                reader_id=claim.reader_id,
                lease_s=claim.lease_s,
                token=new_secret(),
                reply_to=call,
                holder=call.session.sender.key,
                process=ev.ReaderProcess(claim.reader_agent, claim.reader_boot),
            )
        )

    def _renew(self, renew: Renew, call: Call) -> None:
        self._driver.dispatch(
            ev.Renewed(
                offer_id=renew.offer_id,
                epoch=renew.epoch,
                token=renew.token,
                lease_s=renew.lease_s,
                known_blocks=renew.known_blocks,
                reply_to=call,
                holder=call.session.sender.key,
            )
        )

    def _confirm(self, confirm: Confirm, call: Call) -> None:
        holder, lease = call.session.sender.key, (confirm.offer_id, confirm.epoch, confirm.token)
        self._driver.dispatch(ev.Confirmed(*lease, call, holder))

    def _take(self, take: Take, call: Call) -> None:
        self._driver.dispatch(
            ev.Taken(
                offer_id=take.offer_id,
                secret=take.secret,
                reader_id=take.reader_id,
                token=take.token,
                tables=take.tables,
                reply_to=call,
                holder=call.session.sender.key,
                process=ev.ReaderProcess(take.reader_agent, take.reader_boot),
            )
        )

    def _release(self, release: Release, call: Call) -> None:
        holder, lease = call.session.sender.key, (release.offer_id, release.epoch, release.token)
        self._driver.dispatch(ev.Returned(*lease, call, holder))

    def _withdraw_for_router(self, withdraw: PeerWithdraw, call: Call) -> None:
        self._driver.dispatch(ev.Withdrawn(withdraw.offer_id, withdraw.secret, call))

    def _withdraw_forgone(self, command: meeting.Withdraw) -> None:
        self._driver.dispatch(ev.Withdrawn(command.offer_id, command.secret, command.reply_to))

    def _meet(self, meet: Meet, call: Call) -> None:
        left = meeting.Abandoned(meet.transfer_id, call)
        call.on_end = partial(self._meeting_driver.dispatch, left)
        self._meeting_driver.dispatch(meeting.Awaited(meet.transfer_id, meet.wait_s, call))

    def _forgo(self, forgo: Forgo, call: Call) -> None:
        self._meeting_driver.dispatch(meeting.Forgone(forgo.transfer_id, call))

    def _open(self, offer: MakeOffer, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        check_tables(engine, offer.tables, offer.num_tokens, sealed=offer.sealed)
        if offer.transfer_id is not None:
            self._meetings.check_free(offer.transfer_id)
        identity, offer_id, secret = self._agent.identity, uuid.uuid4().hex, new_secret()
        max_blocks, traceparent = self._config.ticket_blocks, known_trace(offer.traceparent)
        ticket = Ticket(
            agent_id=identity.agent_id,
            agent_boot=identity.boot,
            endpoint=identity.peer_endpoint,
            engine_id=engine.engine_id,
            engine_instance=engine.instance,
            offer_id=offer_id,
            request_id=offer.request_id,
            num_tokens=offer.num_tokens,
            secret=secret,
            server_key=identity.server_key,
            audience=offer.audience,
            prompt_digest=offer.prompt_digest,
            blocks=packed_tables(offer.tables, max_blocks=max_blocks) if offer.sealed else "",
            traceparent=traceparent,
        )
        if self._ticket_keys is not None:
            lifetime_s = self._config.ticket_lifetime_s
            ticket = self._ticket_keys.sign(ticket, now_s=time.time(), lifetime_s=lifetime_s)
        self._driver.dispatch(
            ev.Opened(
                offer_id=offer_id,
                engine_id=engine.engine_id,
                request_id=offer.request_id,
                num_tokens=offer.num_tokens,
                tables=offer.tables,
                sealed=offer.sealed,
                ttl_s=offer.ttl_s or self._config.offer_ttl_s,
                secret=secret,
                ticket=ticket.to_json(),
                reply_to=call,
                ticket_blocks=max_blocks if self._may_name_blocks(offer) else 0,
                readers=offer.readers,
                traceparent=traceparent,
                asked_s=offer.asked_s,
            )
        )
        if offer.transfer_id is not None and offer_id in self._table.live:
            fields = ticket.to_json()
            self._meeting_driver.dispatch(meeting.Made(offer.transfer_id, offer_id, fields))

    def _may_name_blocks(self, offer: MakeOffer) -> bool:
        """Whether the engine may do so, at the end: not in what the site signs."""
        return not offer.sealed and self._ticket_keys is None

    def _extend(self, more: ExtendOffer, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        offer = self._own(engine, more.offer_id)
        if offer is not None:
            known = offer.tables
            tables = known | {
                group: known[group].extended(added) if group in known else added
                for group, added in more.tables.items()
            }
            check_tables(engine, tables, more.num_tokens, sealed=False)
        self._driver.dispatch(ev.Extended(more.offer_id, more.num_tokens, more.tables, call))

    def _seal(self, sealed: SealOffer, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        offer = self._own(engine, sealed.offer_id)
        if offer is not None:
            check_tables(engine, offer.tables, offer.num_tokens, sealed=True)
        self._driver.dispatch(ev.Sealed(sealed.offer_id, call))

    def _withdraw(self, withdraw: WithdrawOffer, call: Call) -> None:
        self._own(self._agent.engines.engine_of(call), withdraw.offer_id)
        self._driver.dispatch(ev.Withdrawn(withdraw.offer_id, None, call))

    def _own(self, engine: LocalEngine, offer_id: str) -> OfferEntry | None:
        """The engine's offer, None when there is none; raises `LocalError` for another engine's."""
        offer = self._table.live.get(offer_id)
        if offer is not None and offer.opened.engine_id != engine.engine_id:
            raise LocalError("the offer is another engine's", code=ErrorCode.OFFER_UNKNOWN)
        return offer

    def _publish(self, command: ev.Publish) -> None:
        self._agent.publisher.publish(command.op, command.body)

    def _begin_lease(self, command: ev.BeginLease) -> None:
        """Connection set-up and READs need progress here."""
        token = self._agent.transport.hold_progress()
        self._tokens[command.offer_id, command.epoch] = token

    def _end_lease(self, command: ev.EndLease) -> None:
        """A reader that came to its end needs no progress; a late one, so that it can end."""
        offer_id, epoch, reason = command.offer_id, command.epoch, command.reason
        self._metrics.leases.labels(reason).inc()
        self._packing.end_lease(offer_id, epoch, command.code)
        token = self._tokens.pop((offer_id, epoch))
        if reason == "ended":
            token.close()
            return
        log.warning(f"lease.{reason}", offer_id=offer_id, epoch=epoch)
        self._agent.loop.call_later(self._config.late_read_s, token.close)

    def _report_released(self, released: ev.ReportReleased) -> None:
        """The engine first: it waits for its blocks, while the log and the counters do not."""
        engine = self._agent.engines.engines.get(released.engine_id)
        if engine is not None:
            engine.notify(
                Released(
                    offer_id=released.offer_id,
                    request_id=released.request_id,
                    outcome=released.outcome,
                ),
                partial(self._note_told, released.offer_id),
            )
        over = LocalError("the offer is over", code=ErrorCode(f"offer_{released.outcome}"))
        self._meeting_driver.dispatch(meeting.Ended(released.offer_id, over))
        self._export(released.offer_id)
        lived_s = self._driver.now - released.opened_at
        self._metrics.offers.labels(released.outcome).inc()
        self._metrics.offer_life_s.observe(lived_s)
        log.info(
            "offer.released",
            request_id=released.request_id,
            offer_id=released.offer_id,
            engine_id=released.engine_id,
            outcome=released.outcome.value,
            num_tokens=released.num_tokens,
            lived_s=round(lived_s, 6),
        )

    def _note_told(self, offer_id: str, told_at: float) -> None:
        self._table.note_told(offer_id, told_at, self._driver.now)

    def _export(self, offer_id: str) -> None:
        """Its spans go to the collector, if there is one."""
        offer = self._table.find(offer_id)
        if self._agent.outbox is not None and offer is not None:
            make_spans = self._spans.later(offer)
            self._agent.outbox.put(make_spans, offer_id, offer.opened.traceparent)

    def _check_idle(self) -> None:
        if not self._table.live:
            self._idle.set()

    def _readings(self) -> dict[str, float]:
        stats = self._agent.transport.stats()
        return {
            **self.counts(),
            "awaited_offers": self._meetings.num_waiting,
            "ended_bytes": self._table.retired_bytes,
            "engines": len(self._agent.engines.engines),
            "progress_tokens": stats.progress_tokens,
            "registered_bytes": stats.registered_bytes,
            "memory_readers": self._lender.num_readers,
        }
