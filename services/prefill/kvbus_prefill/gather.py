"""Gathers the boxes that readers ask for into staging slots, in worker threads.

Refuses, as ``stale``, readers of memory that is not there any more; who may have a slot, and when,
is the slot table's. The memory of an engine is not given back while a gather reads it.
"""

import asyncio
import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvbus.agent.copiers import Copiers
from kvbus.agent.engines import LocalEngine
from kvbus.agent.loop import guarded
from kvbus.agent.service import Agent
from kvbus.agent.slots import SlotMemory
from kvbus.bus import Call, Handlers, Shared
from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol.message import Empty
from kvbus.protocol.peer import CheckMemory, Pack, Packed, Unpack
from kvbus.table import Driver
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.gather_box import Gather, check_box
from kvbus_prefill.metrics import PrefillMetrics
from kvbus_prefill.offer.table import OfferTable
from kvbus_prefill.progress_lease import ProgressLeases
from kvbus_prefill.slots import events as ev
from kvbus_prefill.slots.entry import SlotEntry
from kvbus_prefill.slots.table import SlotTable

MOST_LOST = 64
"""Engines that are gone, whose late readers are served so that their READs end."""

if TYPE_CHECKING:
    from kvbus.memory.paged import PagedMemory


class Packing:
    """The packed path of a prefill agent: its requests, its slots and its gathers.

    Each device has a slot table of its own; their ids are shared. A box of an offer that is here is
    checked against ``offers``. What an engine offers elsewhere, of which only some ranks are here,
    is bounded by the leases of the slots alone: its reader takes where the offer is.
    """

    def __init__(
        self,
        agent: Agent,
        config: PrefillConfig,
        metrics: PrefillMetrics,
        offers: OfferTable,
    ) -> None:
        self._agent, self._config, self._metrics = agent, config, metrics
        self._offers = offers
        self._devices: dict[str, tuple[SlotTable, Driver[ev.Event]]] = {}
        self._lost: dict[str, LocalEngine] = {}
        self._slot_ids = count(1)
        self.copiers = Copiers(
            agent.loop, num_threads=config.pack_threads, new_executor=agent.new_executor
        )
        """Its threads, for whatever else reads the memory of engines."""
        self._progress_leases = ProgressLeases(
            agent.transport, agent.loop, max_readers=config.max_offers
        )

    def handlers(self) -> Handlers:
        """A reader wants a box, gives slots back, or asks whether the memory is still the same."""
        pack = Shared(self._pack, self._config.max_unpacked)
        return {Pack: pack, Unpack: self._unpack, CheckMemory: self._check}

    def end_lease(self, offer_id: str, epoch: int, code: ErrorCode) -> None:
        """Nothing that was gathered under this lease is valid any more; ``code`` says why."""
        for table, driver in self._devices.values():
            if table.live:
                driver.dispatch(ev.LeaseEnded((offer_id, epoch), code))

    def end_engine(self, engine: LocalEngine) -> None:
        """Its slots are free, but those that are gathered into."""
        if engine.ranks:
            self._lost[engine.memory_id] = engine
        if len(self._lost) > MOST_LOST:
            del self._lost[next(iter(self._lost))]
        self._dispatch_all(ev.EngineLost(engine.engine_id))
        self.copiers.forget(engine)

    async def quiesce(self, engine: LocalEngine) -> None:
        """Return when no gather reads the engine's memory any more."""
        await self.copiers.quiesce(engine)

    def stop(self) -> None:
        """Refuse what waits."""
        self._dispatch_all(ev.Stopped())
        for _, driver in self._devices.values():
            driver.stop()

    def counts(self) -> dict[str, int]:
        """Boxes that wait, and slots in use."""
        tables = [table for table, _ in self._devices.values()]
        return {
            "packs": sum(table.num_waiting for table in tables),
            "slots": sum(table.num_slots_in_use for table in tables),
        }

    def boxes_of(self, offer_id: str) -> list[SlotEntry]:
        """The boxes that were asked for under leases of an offer, as far as they are known."""
        return [box for table, _ in self._devices.values() for box in table.named(offer_id)]

    def _dispatch_all(self, event: ev.Event) -> None:
        for _, driver in list(self._devices.values()):
            driver.dispatch(event)

    def _check(self, check: CheckMemory, call: Call) -> None:
        """A reader is about to read, goes on reading, or has read what is offered elsewhere."""
        reader = call.session.name, check.offer_id
        lost = self._lost.get(check.memory_id)
        if lost is None:
            self.engine(check.engine_id, check.memory_id, check.access)
        else:
            lost.check_access(check.access)
        if check.progress_s:
            for_s = min(check.progress_s, self._config.max_lease_s) + self._config.late_read_s
            self._progress_leases.begin(reader, call.session.party, for_s=for_s)
        else:
            self._progress_leases.end(reader)
        if lost is not None:  # what is still in flight ends, and counts for nothing
            self.engine(check.engine_id, check.memory_id, check.access)
        call.reply(Empty())

    def _unpack(self, unpack: Unpack, call: Call) -> None:
        self._dispatch_all(ev.GivenBack(unpack.slot_ids, call.session.name))
        call.reply(Empty())

    def _pack(self, pack: Pack, call: Call) -> None:
        reader = call.session.name
        if pack.done:
            self._dispatch_all(ev.GivenBack(pack.done, reader))
        self._agent.staging.check_packs()
        engine = self.engine(pack.engine_id, pack.memory_id, pack.access)
        gather = check_box(engine, pack, max_bytes=self._agent.staging.slot_bytes)
        if not self.copiers.ready:
            self._agent.tasks.start_soon(self._pack_when_ready, pack, call)
            return
        lease = pack.offer_id, pack.epoch
        offered_here = engine.control is not None
        wanted = ev.SlotWanted(
            lease=lease if offered_here else (reader, *lease),
            reader=reader,
            engine_id=engine.engine_id,
            num_bytes=gather.num_bytes,
            slot_lease_s=pack.slot_lease_s,
            work=gather,
            reply_to=call,
            priority=pack.priority,
            offer_id=pack.offer_id,
        )
        if offered_here:
            now, is_state = self._agent.loop.time(), bool(gather.group.state)
            self._offers.check_pack(pack, now, is_state=is_state)
        device = gather.memory.device
        _, driver = self._devices.get(device) or self._open(device)
        call.on_end = partial(driver.dispatch, ev.Abandoned(wanted.lease, call))
        driver.dispatch(wanted)

    # The first box waits for torch before its offer is asked and a slot is leased: the import can
    # take longer than that lease. The reader counts the slot's lease from when it sent the request,
    # so what the box waited here is added, and the slot is kept for as long again.
    #
    #     reader:   sent ─────────────────────────── lease_s + waited ──┤ no READ ends later
    #     here:          received ── waited ── slot leased ── lease_s + waited ──────┤ slot is free
    async def _pack_when_ready(self, pack: Pack, call: Call) -> None:
        received_at = self._agent.loop.time()

        async def retry() -> None:
            await asyncio.wrap_future(self.copiers.prepare())
            waited_s = self._agent.loop.time() - received_at
            if not call.answered:
                self._pack(replace(pack, slot_lease_s=pack.slot_lease_s + waited_s), call)

        await guarded(retry, call.refuse)

    def engine(self, engine_id: str, memory_id: str, access: str) -> LocalEngine:
        """The engine with exactly these processes, for who may read it; raises `LocalError`."""
        engine = self._agent.engines.engines.get(engine_id)
        if engine is None:
            raise LocalError(
                f"engine '{engine_id}' is not here, or has ended",
                code=ErrorCode.ENGINE_LOST,
                engine_id=engine_id,
            )
        engine.check_access(access)
        if engine.memory_id != memory_id:
            raise LocalError(
                f"engine '{engine_id}' came back with other memory",
                code=ErrorCode.STALE,
                engine_id=engine_id,
                theirs=memory_id,
                ours=engine.memory_id,
            )
        return engine

    def _open(self, device: str) -> tuple[SlotTable, Driver[ev.Event]]:
        """The table of a device, with what its commands do; raises `LocalError` without slots."""
        memory = self._agent.staging.at(device)
        table = SlotTable(self._config.slot_limits(num_slots=memory.num_slots), self._slot_ids)
        driver: Driver[ev.Event] = Driver(table, self._agent.loop)
        driver.commands |= {
            ev.StartGather: partial(self._start_gather, memory, driver),
            ev.StartWipe: partial(self._start_wipe, memory, driver),
            ev.ReplyPacked: partial(self._reply_packed, memory),
        }
        self._devices[device] = table, driver
        return table, driver

    def _start_gather(
        self, memory: SlotMemory, driver: Driver[ev.Event], command: ev.StartGather
    ) -> None:
        gather, slot_id = command.work, command.slot_id
        if not isinstance(gather, Gather):
            raise TypeError(f"{gather} is nothing to gather")
        self.copiers.start(
            command.turn,
            partial(self._gather, gather, memory, command.slot),
            lambda error: driver.dispatch(ev.GatherEnded(slot_id, error)),
            engine=gather.engine,
            memories=(gather.memory,),
            group=gather.group,
        )

    def _gather(self, work: Gather, memory: SlotMemory, slot: int, paged: "PagedMemory") -> None:
        """Copy, in a thread."""
        from kvbus.memory import copying  # noqa: PLC0415  # imports torch: seconds

        started_at = time.perf_counter()
        buffer = copying.Slot(memory.tensor(slot), work.order)
        copying.gather(paged, work.table, work.box, buffer)
        self._metrics.gather_s.observe(time.perf_counter() - started_at)

    def _start_wipe(
        self, memory: SlotMemory, driver: Driver[ev.Event], command: ev.StartWipe
    ) -> None:
        self.copiers.start_alone(
            lambda: memory.wipe(command.slot),
            lambda: driver.dispatch(ev.WipeEnded(command.slot_id)),
        )

    def _reply_packed(self, memory: SlotMemory, command: ev.ReplyPacked) -> None:
        self._metrics.packed_bytes.inc(command.num_bytes)
        if isinstance(command.reply_to, Call):
            packed = Packed(
                slot_id=command.slot_id,
                address=memory.address(command.slot),
                num_bytes=command.num_bytes,
                slot_lease_s=command.slot_lease_s,
                memory=memory.memory,
                device=memory.device,
            )
            command.reply_to.reply(packed)
