"""Tiles that readers request: the data process gathers them into slots, or digests them."""

from functools import partial
from typing import NamedTuple

import structlog

from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.loop import failure
from kvbus.agent.ordering import Ordering
from kvbus.agent.segments import RegisteredRank
from kvbus.agent.service import Agent
from kvbus.bus import Call, Handlers, Quota
from kvbus.data import messages as wire
from kvbus.data.client import DataProcess, ProgressToken
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError
from kvbus.geometry import GroupSpec, check_exact, slot_bytes, slot_region
from kvbus.planning import num_pieces
from kvbus.protocol.message import Empty
from kvbus.protocol.peer import (
    MAX_DIGESTS,
    AwaitWork,
    CheckMemory,
    Digest,
    Digests,
    Pack,
    Unpack,
)
from kvbus.table.events import EngineLost, Stopped
from kvbus.table.table import Driver, Promise
from kvbus_prefill import slot_table as slots
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.offer.table import OfferTable
from kvbus_prefill.offer_reports import PrefillMetrics

log = structlog.get_logger()

MAX_PACKS = 1024
MOST_LOST = 64
"""Limit of lost engines with late readers."""
MOST_DIGESTS = 256
MAX_AWAITED = 1024
WIPES_AGAIN_S = 0.1


class Gather(NamedTuple):
    engine: LocalEngine
    memory: RegisteredRank
    group: GroupSpec


class Packing:
    """Packing, digests, and checks of reads.

    Only slot leases bound tiles of an offer at another agent, as its reader commits there.
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
        self.slots = slots.SlotTable(
            slots.SlotLimits(
                num_slots=agent.staging.num_slots,
                max_slot_lease_s=config.max_lease_s,  # like leases of offers
                wipe=agent.staging.only,
            )
        )
        self._driver: Driver[slots.Event] = Driver(self.slots, agent.loop)
        self._driver.commands[slots.StartWipe] = self._start_wipe
        self._driver.promise(slots.StartGather, self._start_gather, _gather_failed)
        self._lost: dict[str, LocalEngine] = {}
        self._progress: ProgressToken | None = None
        self._driven_until = 0.0

    def handlers(self, ordering: Ordering) -> Handlers:
        return {
            Pack: Quota(self._pack, MAX_PACKS),
            Unpack: self._unpack,
            CheckMemory: self._check,
            AwaitWork: Quota(partial(self._await_work, ordering), MAX_AWAITED),
            Digest: Quota(self._digest, MOST_DIGESTS),
        }

    def end_lease(self, offer_id: str, epoch: int, code: ErrorCode) -> None:
        if self.slots.live:
            self._driver.dispatch(slots.LeaseEnded((offer_id, epoch), code))

    def end_engine(self, engine: LocalEngine) -> None:
        if engine.ranks:
            self._lost[engine.memory_id] = engine
        if len(self._lost) > MOST_LOST:
            del self._lost[next(iter(self._lost))]
        self._driver.dispatch(EngineLost(engine.engine_id))

    def stop(self) -> None:
        self._driver.dispatch(Stopped())
        self._driver.stop()

    def _engine(self, request: Pack | Digest | CheckMemory | AwaitWork) -> LocalEngine:
        """Return the engine with exactly this memory."""
        engine = self._agent.engines.find(request.engine_id)
        if engine is None:
            raise LocalError(
                f"engine '{request.engine_id}' is not here, or has ended",
                code=ErrorCode.ENGINE_LOST,
                engine_id=request.engine_id,
            )
        engine.check_rank_secret(request.rank_secret)
        if engine.memory_id != request.memory_id:
            raise LocalError(
                f"engine '{request.engine_id}' registered again with other memory",
                code=ErrorCode.STALE,
                engine_id=request.engine_id,
                theirs=request.memory_id,
                ours=engine.memory_id,
            )
        return engine

    # Checks of reads.

    def _check(self, check: CheckMemory, call: Call) -> None:
        """Confirm the memory for a read of an offer at another agent."""
        check_read_from(self._agent.data, check.nixl_agent)
        lost = self._lost.get(check.memory_id)
        if lost is None:
            for process in list(self._engine(check).processes):
                process.segments.find_cuts()
            lost = self._lost.get(check.memory_id)
        else:
            lost.check_rank_secret(check.rank_secret)
        if check.progress_s:
            for_s = min(check.progress_s, self._config.max_lease_s) + self._config.late_read_s
            self._drive_until(self._agent.loop.time() + for_s)
        if lost is not None:  # its READs can end now, but are not valid
            self._engine(check)
        call.reply(Empty())

    def _await_work(self, ordering: Ordering, request: AwaitWork, call: Call) -> None:
        engine, reply = self._engine(request), partial(call.reply, Empty())
        after = 0 if engine.is_home else request.after  # the home reached it before its grant
        call.on_end = partial(ordering.drop, engine, call)
        ordering.submit(engine, call, call, reply, after=after)

    # This agent does not see leases at other agents. Over TCP, NIXL serves READs and sets
    # connections up only while this agent drives progress. It does so until the latest time that a
    # reader has requested. Readers repeat the request while they read, and one timer serves all.
    def _drive_until(self, when: float) -> None:
        self._driven_until = max(self._driven_until, when)
        if self._progress is None:
            self._progress = self._agent.data.drive_progress()
            self._agent.loop.call_at(self._driven_until, self._end_progress)

    def _end_progress(self) -> None:
        if self._agent.loop.time() < self._driven_until:
            self._agent.loop.call_at(self._driven_until, self._end_progress)
        elif self._progress is not None:
            self._progress.close()
            self._progress = None

    # Packing.

    def _unpack(self, unpack: Unpack, call: Call) -> None:
        self._driver.dispatch(slots.SlotReleased(unpack.slot_ids, call.session.name))
        call.reply(Empty())

    def _pack(self, pack: Pack, call: Call) -> None:
        reader, lease = call.session.name, (pack.offer_id, pack.epoch)
        if pack.done:
            self._driver.dispatch(slots.SlotReleased(pack.done, reader))
        self._agent.staging.check_packs()
        engine = self._engine(pack)
        work, num_bytes = _gather_of(engine, pack, max_bytes=self._agent.staging.slot_bytes)
        if engine.is_home:
            now, is_state = self._agent.loop.time(), bool(work.group.state)
            self._offers.check_pack(pack, now, is_state=is_state)
        wanted = slots.SlotWanted(
            pack=pack,
            lease=lease if engine.is_home else (reader, *lease),
            reader=reader,
            slots=self._agent.staging.at(work.memory.device),
            num_bytes=num_bytes,
            work=work,
            reply_to=call,
        )
        call.on_end = partial(self._driver.dispatch, slots.TileCancelled(wanted.lease, call))
        self._driver.dispatch(wanted)

    def _start_gather(self, command: slots.StartGather, promise: Promise[slots.Event]) -> None:
        request, work = command.wanted, command.wanted.work
        device_slots = self._agent.staging.at(request.slots.device)

        def end(reply: wire.DataReply) -> None:
            error = reply.failure()
            if error is None:
                self._metrics.gather_s.add({"": reply.seconds})
                self._metrics.packed_bytes.values[()] += request.num_bytes
            promise(slots.GatherEnded(command.slot_id, error))

        gather = wire.GatherJob(
            memory=work.memory.number,
            table=request.pack.table,
            tile=request.pack.tile,
            device=device_slots.device,
            slot=command.slot,
            turn=wire.Turn(str(request.lease), request.pack.priority),
        )
        uses = (work.memory.defined, device_slots.defined)
        self._agent.data.start(gather, end, uses=uses)

    # A slot stays in use until its wipe succeeds, as its next reader would see the bytes. The slots
    # of a restarted data process are wiped again.
    def _start_wipe(self, command: slots.StartWipe) -> None:
        device_slots = self._agent.staging.at(command.slots.device)

        def end(reply: wire.DataReply) -> None:
            if reply.error is None:
                self._driver.dispatch(slots.WipeEnded(command.slot_id))
            else:
                self._wipe_later(command, reply.error.error())

        wipe = wire.Wipe(device=device_slots.device, slot=command.slot)
        try:
            self._agent.data.start(wipe, end, uses=(device_slots.defined,))
        except KVBusError as error:
            self._wipe_later(command, error)

    def _wipe_later(self, command: slots.StartWipe, error: KVBusError) -> None:
        if not self.slots.stopped:
            level = "warning" if self._agent.data.is_running else "debug"
            getattr(log, level)("slot.unwiped", slot=command.slot, reason=error.message)
            self._agent.loop.call_later(WIPES_AGAIN_S, self._start_wipe, command)

    # Digests. A digest reveals something of the bytes, so its request needs the offer's secret. If
    # the offer ends meanwhile, its blocks may have other bytes by then. The offer is therefore
    # checked twice: for the right before, and for validity after.

    def _digest(self, request: Digest, call: Call) -> None:
        self._offers.check_parked(request)  # the engine may have ended
        engine, tile = self._engine(request), request.tile
        memory, group = _holder(engine, request)
        if num_pieces(tile) > MAX_DIGESTS:
            raise GeometryError(
                f"a tile of {num_pieces(tile)} pieces, digests are made of at most {MAX_DIGESTS}: "
                "request a smaller one",
                field="tile",
            )
        slot_region(group, tile)  # raises for a tile outside the group
        is_state = bool(group.state)

        def check() -> None:
            if engine.is_home:
                self._offers.check_digest(request, is_state=is_state)
            self._engine(request)

        def end(made: wire.DataReply) -> None:
            try:
                check()  # an engine that has ended aborts the job: that is the reason
                if made.error is not None:
                    raise made.error.error()
            except KVBusError as error:
                call.refuse(error)
            else:
                digests = made.result.digests if isinstance(made.result, wire.Digested) else b""
                call.reply(Digests(digests=digests))

        check()
        digest = wire.DigestJob(
            memory=memory.number,
            table=request.table,
            tile=tile,
            offer_id=request.offer_id,
            one_in=request.one_in,
            turn=wire.Turn(request.offer_id),
        )
        call.on_end = self._agent.data.start(digest, end, uses=(memory.defined,)).abort


def _gather_failed(command: slots.StartGather, error: Exception) -> slots.GatherEnded:
    return slots.GatherEnded(command.slot_id, failure(error))


# A READ names a process by its network address or its pid (UCX reads local memory by
# `process_vm_readv`), and memory by its address there. All three may have another meaning after the
# data process has ended:
#
#     data process A     serves at port P, pid N ──✗
#     data process B                                 serves at port P, or has pid N
#     reader             handshake (A) ── READ from A's addresses ── commit
#
# B then serves a READ that was meant for A, with its own bytes at these addresses. A READ is
# therefore valid only if A still runs when the reader commits. In that case A has run since the
# handshake, so its port, pid and addresses meant A all the time. The kernel reuses neither before
# this process has reaped A, and B starts after that.
def check_read_from(data: DataProcess, nixl_agent: str) -> None:
    """Raise `LocalError` (``stale``) if bytes were read from an earlier data process."""
    if nixl_agent and nixl_agent != data.nixl_name:
        raise LocalError(
            "what was read came from a data process that has ended: read again",
            code=ErrorCode.STALE,
        )


def _holder(engine: LocalEngine, request: Pack | Digest) -> tuple[RegisteredRank, GroupSpec]:
    """Return a tile's memory and group; the copy refuses positions that the rank lacks."""
    tile = request.tile
    memory, groups = engine.ranks.get(request.rank), {one.name: one for one in engine.spec.groups}
    if memory is None:
        raise GeometryError(
            f"rank {request.rank} of engine '{engine.engine_id}' is not here, but "
            f"{', '.join(map(str, sorted(engine.ranks)))}",
            field="rank",
        )
    group = groups.get(tile.group)
    if group is None:
        raise GeometryError(
            f"no group '{tile.group}', the engine has {', '.join(sorted(groups))}", field="group"
        )
    num_blocks = memory.num_blocks.get(group.name, 0)
    check_exact(group, request.table, (tile.start, tile.stop), num_blocks=num_blocks)
    return memory, group


def _gather_of(engine: LocalEngine, pack: Pack, *, max_bytes: int) -> tuple[Gather, int]:
    memory, group = _holder(engine, pack)
    part = pack.tile.parts[0]
    if part not in group.parts:
        raise GeometryError(f"group '{group.name}' has no part '{part}'", field="parts")
    num_bytes = slot_bytes(group, pack.tile)
    if num_bytes > max_bytes:  # before `slot_region`, which is slow and large for a huge tile
        raise GeometryError(
            f"a tile of {num_bytes} bytes is larger than a slot of {max_bytes} bytes: request a "
            "smaller one",
            tile_bytes=num_bytes,
            slot_bytes=max_bytes,
        )
    slot_region(group, pack.tile)  # raises for a tile outside the group
    return Gather(engine, memory, group), num_bytes
