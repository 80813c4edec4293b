"""The prefill agent: requests become events of the offer table, its commands become replies.

Refuses to hold any state of an offer itself.
"""

import uuid

import anyio
import structlog

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.process.refusals import refuse, unknown_op
from kvbus.agent.process.service import Agent
from kvbus.bus import Call
from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol.engine import ExtendOffer, MakeOffer, Released, SealOffer, WithdrawOffer
from kvbus.protocol.message import from_body, to_body
from kvbus.protocol.peer import Handshake
from kvbus.protocol.remote_ranks import CheckMemory
from kvbus.protocol.staging import Pack, Unpack
from kvbus.protocol.ticket import Ticket
from kvbus.table import Driver
from kvbus.transport import ProgressToken
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.gather import Packing
from kvbus_prefill.handshake import answer_handshake
from kvbus_prefill.metrics import READINGS, PrefillMetrics
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.table import OfferTable
from kvbus_prefill.requests import check_tables, peer_event

log = structlog.get_logger()


class PrefillService:
    """Everything of a prefill agent that is not shared with the decode agent."""

    def __init__(self, agent: Agent, config: PrefillConfig) -> None:
        self._agent, self._config = agent, config
        self._table = OfferTable(limits=config.offer_limits)
        self._driver: Driver[ev.Event, ev.Command] = Driver(
            self._table,
            {
                ev.SendReply: self._reply,
                ev.Refuse: self._refuse,
                ev.AdmitPack: self._admit_pack,
                ev.BeginLease: self._begin_lease,
                ev.EndLease: self._end_lease,
                ev.ReportReleased: self._report_released,
                ev.Publish: self._publish,
            },
            deadline_passed=ev.DeadlinePassed(),
            on_settled=self._on_settled,
            loop=agent.loop,
        )
        self._idle = anyio.Event()
        self._tokens: dict[tuple[str, int], ProgressToken] = {}
        self._metrics = PrefillMetrics(agent.metrics)
        self._packing = Packing(agent, config, self._metrics, ask_offer=self._driver.dispatch)
        agent.metrics.add_readings(self._readings, READINGS)

    def on_engine_call(self, call: Call) -> None:
        """An offer, or what becomes of one."""
        engine = self._agent.engines.engine_of(call)
        match call.op:
            case MakeOffer.op:
                self._open(engine, from_body(MakeOffer, call.body), call)
            case ExtendOffer.op:
                self._extend(engine, from_body(ExtendOffer, call.body), call)
            case SealOffer.op:
                self._seal(engine, from_body(SealOffer, call.body), call)
            case WithdrawOffer.op:
                withdrawn = from_body(WithdrawOffer, call.body)
                self._driver.dispatch(ev.Withdrawn(self._own(engine, withdrawn.offer_id), call))
            case _:
                raise unknown_op(call)

    def on_peer_call(self, call: Call) -> None:
        """A reader shakes hands, uses a lease or wants boxes packed, or a router withdraws."""
        match call.op:
            case Handshake.op:
                handshake = from_body(Handshake, call.body)
                self._agent.tasks.start_soon(
                    answer_handshake, self._agent, self._config, handshake, call
                )
            case Pack.op | Unpack.op | CheckMemory.op:
                self._packing.on_call(call)
            case _:
                self._driver.dispatch(peer_event(call, boot=self._agent.identity.boot))

    def on_engine_lost(self, engine: LocalEngine) -> None:
        """Its offers end; nobody is there to be told."""
        self._packing.end_engine(engine)
        self._driver.dispatch(ev.EngineLost(engine.engine_id))

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
        self._driver.dispatch(ev.DrainStarted())

    async def drained(self) -> None:
        """Return when the last offer is released."""
        await self._idle.wait()

    def stop(self) -> None:
        """Withdraw what is left."""
        self._packing.stop()
        self._driver.dispatch(ev.Stopped())
        self._driver.stop()

    def counts(self) -> dict[str, int]:
        """What the table holds."""
        table = self._table
        offers = {"offers": len(table.live), "leases": table.num_leases()}
        return offers | self._packing.counts()

    def _open(self, engine: LocalEngine, offer: MakeOffer, call: Call) -> None:
        check_tables(engine, offer.tables, offer.num_tokens, sealed=offer.sealed)
        identity, offer_id = self._agent.identity, uuid.uuid4().hex
        ticket = Ticket(
            agent_id=identity.agent_id,
            agent_boot=identity.boot,
            endpoint=identity.peer_endpoint,
            engine_id=engine.engine_id,
            engine_boot=engine.boot,
            offer_id=offer_id,
            request_id=offer.request_id,
            num_tokens=offer.num_tokens,
        )
        self._driver.dispatch(
            ev.Opened(
                offer_id=offer_id,
                engine_id=engine.engine_id,
                request_id=offer.request_id,
                num_tokens=offer.num_tokens,
                tables=offer.tables,
                sealed=offer.sealed,
                ttl_s=offer.ttl_s or self._config.offer_ttl_s,
                ticket=ticket.to_json(),
                reply_to=call,
            )
        )

    def _extend(self, engine: LocalEngine, more: ExtendOffer, call: Call) -> None:
        offer = self._table.live.get(self._own(engine, more.offer_id))
        if offer is not None:
            known = offer.tables
            tables = known | {
                group: known[group].extended(added) if group in known else added
                for group, added in more.tables.items()
            }
            check_tables(engine, tables, more.num_tokens, sealed=False)
        self._driver.dispatch(ev.Extended(more.offer_id, more.num_tokens, more.tables, call))

    def _seal(self, engine: LocalEngine, sealed: SealOffer, call: Call) -> None:
        offer = self._table.live.get(self._own(engine, sealed.offer_id))
        if offer is not None:
            check_tables(engine, offer.tables, offer.num_tokens, sealed=True)
        self._driver.dispatch(ev.Sealed(sealed.offer_id, call))

    def _own(self, engine: LocalEngine, offer_id: str) -> str:
        offer = self._table.live.get(offer_id)
        if offer is not None and offer.opened.engine_id != engine.engine_id:
            raise LocalError("the offer is another engine's", code=ErrorCode.OFFER_UNKNOWN)
        return offer_id

    def _reply(self, command: ev.SendReply) -> None:
        if isinstance(command.reply_to, Call):
            command.reply_to.reply(to_body(command.body))

    def _refuse(self, command: ev.Refuse) -> None:
        if isinstance(command.reply_to, Call):
            refuse(self._agent.metrics, command.reply_to, command.error)

    def _admit_pack(self, command: ev.AdmitPack) -> None:
        self._packing.admit(command.asked)

    def _publish(self, command: ev.Publish) -> None:
        self._agent.publisher.publish(command.op, to_body(command.body))

    def _begin_lease(self, command: ev.BeginLease) -> None:
        """Connection set-up and READs need progress here."""
        token = self._agent.transport.hold_progress()
        self._tokens[command.offer_id, command.epoch] = token

    def _end_lease(self, command: ev.EndLease) -> None:
        """A reader that came to its end needs no progress; a late one, so that it can end."""
        offer_id, epoch, reason = command.offer_id, command.epoch, command.reason
        self._metrics.leases.labels(reason).inc()
        self._packing.end_lease(offer_id, epoch)
        token = self._tokens.pop((offer_id, epoch))
        if reason == "ended":
            token.close()
            return
        log.warning(f"lease.{reason}", offer_id=offer_id, epoch=epoch)
        self._agent.loop.call_later(self._config.late_read_s, token.close)

    def _report_released(self, released: ev.ReportReleased) -> None:
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
        engine = self._agent.engines.engines.get(released.engine_id)
        if engine is not None:
            engine.notify(
                Released(
                    offer_id=released.offer_id,
                    request_id=released.request_id,
                    outcome=released.outcome,
                )
            )

    def _on_settled(self) -> None:
        if self._table.draining and not self._table.live:
            self._idle.set()

    def _readings(self) -> dict[str, float]:
        stats = self._agent.transport.stats()
        return {
            **self.counts(),
            "engines": len(self._agent.engines.engines),
            "progress_tokens": stats.progress_tokens,
            "registered_bytes": stats.registered_bytes,
        }
