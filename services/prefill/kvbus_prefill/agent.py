"""The prefill agent: requests become events of the offer table, its commands become replies."""

import time
from collections.abc import Callable, Mapping
from functools import partial

import anyio
import structlog

from kvbus.agent.access import load_ticket_keys
from kvbus.agent.engine import LocalEngine
from kvbus.agent.service import Agent, Service
from kvbus.bus import Call, Handlers, Shared, new_secret
from kvbus.errors import GeometryError
from kvbus.geometry import BlockTable, GroupSpec, num_blocks_for
from kvbus.protocol.engine import ExtendOffer, MakeOffer, SealOffer, WithdrawOffer
from kvbus.protocol.events import LeaseEvent, OfferEvent
from kvbus.protocol.message import Message
from kvbus.protocol.peer import (
    Claim,
    Forgo,
    Handshake,
    Meet,
    PeerWithdraw,
    Release,
    Renew,
    Take,
)
from kvbus.protocol.status import Sharing, Status
from kvbus.protocol.ticket import Ticket, packed_tables
from kvbus.protocol.trace import Remembered, Span, Trace, known_trace
from kvbus.table import Driver
from kvbus.table.events import DrainStarted, EngineLost, Stopped
from kvbus.transport import ProgressToken
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.gather import Packing
from kvbus_prefill.handshake import Handshakes
from kvbus_prefill.lending import MemoryLender
from kvbus_prefill.observe import READINGS, OfferSpans, PrefillMetrics
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import NO_BLOCKS
from kvbus_prefill.offer.table import OfferTable

log = structlog.get_logger()


class PrefillService(Service):
    """Everything of a prefill agent that is not shared with the decode agent."""

    def __init__(self, agent: Agent, config: PrefillConfig) -> None:
        self._agent, self._config = agent, config
        self._table = OfferTable(limits=config.offer_limits)
        self._driver: Driver[ev.Event] = Driver(self._table, agent.loop)
        self._driver.commands |= {
            ev.BeginLease: self._begin_lease,
            ev.EndLease: self._end_lease,
            ev.ReportReleased: self._report_released,
            ev.Publish: lambda told: agent.publisher.publish(told.op, told.body),
        }
        self._idle = anyio.Event()
        self._ticket_keys = load_ticket_keys(config.ticket_keys)
        self._tokens: dict[tuple[str, int], ProgressToken] = {}
        self._metrics = PrefillMetrics(agent.metrics)
        self._packing = Packing(agent, config, self._metrics, self._table)
        self._spans = OfferSpans(self._table, self._packing.slots)
        self.lender = MemoryLender(agent, config)
        self._handshakes = Handshakes(agent, config, self._table, self.lender)
        agent.metrics.add_readings(self._readings, READINGS)

    async def start(self) -> None:
        """Open the memory socket. Engines come later."""
        self._driver.dispatch(ev.EnginesGone())
        await self.lender.open()

    def engine_handlers(self) -> Handlers:
        """An offer, or what becomes of one."""
        return {
            MakeOffer: self._open,
            **dict.fromkeys((ExtendOffer, SealOffer, WithdrawOffer), self._change),
        }

    def peer_handlers(self) -> Handlers:
        """A reader shakes hands, uses a lease or wants boxes packed, or a router withdraws."""
        about_offers = (Claim, Renew, Take, Release, PeerWithdraw, Forgo)
        return {
            Handshake: self._handshakes.answer,
            **dict.fromkeys(about_offers, self._forward),
            Meet: Shared(self._meet, self._config.max_handoffs),
            **self._packing.handlers(),
        }

    def on_engine_ready(self, engine: LocalEngine) -> None:
        """Its offers are waited for."""
        self._driver.dispatch(ev.EngineReady())

    def on_engine_lost(self, engine: LocalEngine) -> None:
        """Its offers end; there is no one to be told."""
        self._packing.end_engine(engine)
        self._driver.dispatch(EngineLost(engine.engine_id))
        if not any(other.ready for other in self._agent.engines.engines.values()):
            self._driver.dispatch(ev.EnginesGone())
        self.lender.end_engine(engine)

    async def quiesce(self, engine: LocalEngine) -> None:
        """A reader may still be served late reads; its agent aborts them when its lease is over."""
        log.debug("engine.retiring", engine_id=engine.engine_id)
        await anyio.sleep(self._config.late_read_s)

    def start_draining(self) -> None:
        """No new offers; those that are live wait for their readers."""
        self._driver.on_settled = self._check_idle
        self._driver.dispatch(DrainStarted())

    async def drained(self) -> None:
        """Return when the last offer is released."""
        await self._idle.wait()

    def stop(self) -> None:
        """Withdraw what is left."""
        self._packing.stop()
        self._driver.dispatch(Stopped())
        self._driver.stop()

    def counts(self) -> dict[str, int]:
        """What the tables hold."""
        boxes = self._packing.slots
        return {
            "offers": self._table.num_offers,
            "leases": self._table.num_leases,
            "packs": boxes.num_waiting,
            "slots": boxes.num_slots_in_use,
        }

    def sharing(self) -> Sharing:
        """What its memory socket lends."""
        return self.lender.sharing()

    def story(self, asked: Status) -> list[str]:
        """What happened to an offer."""
        return self._table.story(asked.offer_id)

    def recent(self, number: int) -> list[Callable[[], list[Span]]]:
        """The newest offers."""
        return self._spans.recent(number)

    def spans(self, asked: Trace) -> Remembered:
        """What is remembered of offers."""
        return self._spans.remembered(asked)

    def _forward(self, message: Message, call: Call) -> None:
        """The table answers."""
        key, fresh = call.session.key, new_secret()
        self._driver.dispatch(ev.Asked(message=message, reply_to=call, holder=key, fresh=fresh))

    def _meet(self, meet: Meet, call: Call) -> None:
        left = ev.Abandoned(transfer_id=meet.transfer_id, reply_to=call)
        call.on_end = partial(self._driver.dispatch, left)
        self._forward(meet, call)

    def _open(self, offer: MakeOffer, call: Call) -> None:
        engine = self._agent.engines.engine_of(call)
        check_tables(engine, offer.tables, offer.num_tokens, sealed=offer.sealed)
        identity, max_blocks = self._agent.identity, self._config.ticket_blocks
        ticket = Ticket(
            agent_id=identity.agent_id,
            agent_boot=identity.agent_boot,
            endpoint=identity.peer_endpoint,
            engine_id=engine.engine_id,
            engine_instance=engine.instance,
            offer_id=new_secret(),
            request_id=offer.request_id,
            num_tokens=offer.num_tokens,
            secret=new_secret(),
            server_key=identity.server_key,
            audience=offer.audience,
            prompt_digest=offer.prompt_digest,
            blocks=packed_tables(offer.tables, max_blocks=max_blocks) if offer.sealed else "",
            traceparent=known_trace(offer.traceparent),
        )
        if self._ticket_keys is not None:
            lifetime_s = self._config.ticket_lifetime_s
            ticket = self._ticket_keys.sign(ticket, now_s=time.time(), lifetime_s=lifetime_s)
        # The engine may name blocks itself, at the end, but not in what the site signs.
        may_name = not offer.sealed and self._ticket_keys is None
        self._driver.dispatch(
            ev.Opened(
                message=offer,
                reply_to=call,
                ticket=ticket,
                ttl_s=offer.ttl_s or self._config.offer_ttl_s,
                ticket_blocks=max_blocks if may_name else 0,
            )
        )

    def _change(self, message: ExtendOffer | SealOffer | WithdrawOffer, call: Call) -> None:
        """What an engine wants of its own offer."""
        engine = self._agent.engines.engine_of(call)
        offer = self._table.live.get(message.offer_id)
        if offer is not None and offer.engine_id == engine.engine_id:
            match message:
                case ExtendOffer(num_tokens=num_tokens, tables=more):
                    check_tables(engine, offer.tables_with(more), num_tokens, sealed=False)
                case SealOffer():
                    check_tables(engine, offer.tables, offer.num_tokens, sealed=True)
        changed = ev.Asked(message=message, reply_to=call, engine_id=engine.engine_id)
        self._driver.dispatch(changed)

    def _begin_lease(self, command: ev.BeginLease) -> None:
        """Connection set-up and READs need progress here."""
        lease = command.offer_id, command.epoch
        self._tokens[lease] = self._agent.transport.hold_progress()
        self._agent.publisher.publish("lease.granted", LeaseEvent(*lease))

    def _end_lease(self, command: ev.EndLease) -> None:
        """A reader that came to its end needs no progress; a late one, so that it can end."""
        lease, reason = (command.offer_id, command.epoch), command.reason
        self._metrics.leases.values[reason,] += 1
        self._packing.end_lease(*lease, command.code)
        self._agent.publisher.publish(f"lease.{reason}", LeaseEvent(*lease))
        token = self._tokens.pop(lease)
        if reason == "ended":
            token.close()
            return
        log.warning(f"lease.{reason}", offer_id=command.offer_id, epoch=command.epoch)
        self._agent.loop.call_later(self._config.late_read_s, token.close)

    def _report_released(self, report: ev.ReportReleased) -> None:
        """The engine first: it waits for its blocks, while the log and the counters do not."""
        released = report.released
        engine = self._agent.engines.engines.get(report.engine_id)
        if engine is not None:
            engine.notify(released)
        event = OfferEvent(released.offer_id, report.num_tokens, released.outcome.value)
        self._agent.publisher.publish("offer.released", event)
        sender = self._agent.sender
        if sender is not None and (offer := self._table.find(released.offer_id)) is not None:
            sender.put(self._spans.later(offer), offer.offer_id, offer.traceparent)
        lived_s = self._driver.now - report.opened_at
        self._metrics.offers.values[released.outcome.value,] += 1
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

    def _check_idle(self) -> None:
        if not self._table.live:
            self._idle.set()

    def _readings(self) -> dict[str, float]:
        stats = self._agent.transport.stats()
        return {
            **self.counts(),
            "awaited_offers": self._table.num_waiting,
            "ended_bytes": self._table.retired_bytes,
            "engines": len(self._agent.engines.engines),
            "progress_tokens": stats.progress_tokens,
            "registered_bytes": stats.registered_bytes,
            "memory_readers": self.lender.num_readers,
        }


def check_tables(
    engine: LocalEngine, tables: Mapping[str, BlockTable], num_tokens: int, *, sealed: bool
) -> None:
    """Raise `GeometryError` unless ``tables`` hold what ``num_tokens`` tokens need of each group.

    While an offer is open, a group may have no table yet if no token needs it, and one with a
    window may lack blocks that its end does not need.
    """
    groups = {group.name: group for group in engine.spec.groups}
    if tables.keys() - groups.keys() or (sealed and tables.keys() != groups.keys()):
        raise GeometryError(
            f"tables are of groups {sorted(tables)}, the engine has {sorted(groups)}"
        )
    for name, group in groups.items():
        table = tables.get(name, NO_BLOCKS)
        table.check_ids(engine.num_blocks(name))
        _check_table(group, table, num_tokens, sealed=sealed)


def _check_table(group: GroupSpec, table: BlockTable, num_tokens: int, *, sealed: bool) -> None:
    start, stop = group.positions(0, num_tokens)
    needed, given = num_blocks_for(stop, group.block_size), table.first_block + len(table)
    if given < needed:
        raise GeometryError(
            f"group '{group.name}': {num_tokens} tokens need {needed} blocks, "
            f"the table ends at block {given}",
            needed=needed,
            given=given,
        )
    if group.state and given > 1:
        raise GeometryError(
            f"group '{group.name}' is a state: its table has one block, not {given}", given=given
        )
    if group.window is None and table.first_block:
        raise GeometryError(f"group '{group.name}' has no window, its table must start at block 0")
    if sealed and stop > start and table.first_block > start // group.block_size:
        raise GeometryError(
            f"group '{group.name}': a window of {group.window} tokens before token {num_tokens} "
            f"starts in block {start // group.block_size}, the table in {table.first_block}",
            needed=start // group.block_size,
            given=table.first_block,
        )
