"""Carries out what the read table says: one small method for each stage of a leg.

    read_chunk ─▶ path ─▶ legs ─▶ ReadTable ─▶ Begin: pack, READ, copy, compare
                                      ▲                        │
                                      └─── StageEnded ◀────────┘        ReadEnded ─▶ on_end

A direct chunk starts no task. READs happen on the transport's thread, copies in threads of their
own; READs of many descriptors are planned in a thread as well. A copy of mapped memory that takes
some 0.1 ms is made at once, and needs no leg.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial

import anyio
import structlog

from kvbus.agent.engine import LocalEngine, engine_lost
from kvbus.agent.loop import guarded, in_thread
from kvbus.agent.service import Agent
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError, TransferFailed
from kvbus.planning import Path, Runs
from kvbus.protocol.message import Empty
from kvbus.protocol.peer import Pack, Packed, Unpack
from kvbus.table import Driver, Story
from kvbus.table.events import Stopped
from kvbus.transport import ReadOutcome, ReadStatus
from kvbus_decode import read_table as ev
from kvbus_decode.chunk import ActiveFetch, make_chunk
from kvbus_decode.compare import Comparison
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch.events import ReadChunk, ReadEnded
from kvbus_decode.legs import BoxJob, DirectJob, MappedJob, Rows, rounds_of, short_copy
from kvbus_decode.observe import DecodeMetrics
from kvbus_decode.paths import PathChooser
from kvbus_decode.read_table import Leg, LegState, ReadTable, StageEnded
from kvbus_decode.route import Source

log = structlog.get_logger()

MAX_INLINE_DESCRIPTORS = 16_384
LOSS_KNOWN_WITHIN_S = 2.0
UNPACK_TIMEOUT_S = 5.0
GRACE_S = 2.0
"""How long READs of other peers may take to end; a slice of them is posted at most."""
RECYCLED_WITHIN_S, AGAIN_S = 30.0, 1.0
EXIT_STATUS = 75
"""EX_TEMPFAIL: whatever supervises the agent starts the next, and nothing else has to be done."""


class Reader:
    """All chunks that are read by this agent, for the fetches in ``active``.

    ``on_end`` is called once for each, when nothing can write into the blocks for it any more.
    """

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        chooser: PathChooser,
        metrics: DecodeMetrics,
        *,
        active: Mapping[str, ActiveFetch],
        on_end: Callable[[ReadEnded], None],
    ) -> None:
        self._agent, self._config = agent, config
        self._active, self._on_end, self._one_in = active, on_end, config.digest_one_in
        self._chooser = chooser
        self._table = ReadTable(config.read_limits(num_slots=agent.staging.num_slots))
        self._driver: Driver[ev.Event] = Driver(self._table, agent.loop)
        self._dispatch = self._driver.dispatch
        self._begin_stage: dict[LegState, Callable[[Leg, ev.Begin], None]] = {
            LegState.PACKING: self._pack,
            LegState.READING: self._read,
            LegState.COPYING: self._copy,
            LegState.COMPARING: Comparison(agent, metrics, self._dispatch).start,
        }
        self._driver.commands |= {
            ev.Begin: lambda command: self._begin_stage[command.stage](command.leg, command),
            ev.Abort: lambda command: command.leg.work.abort(),
            ev.ReleaseSlots: lambda command: _release(command.source, command.slot_ids),
            ev.RecycleTransport: self._recycle,
            ReadEnded: on_end,
        }
        self.stop_reads = self._dispatch
        self._idle: dict[LocalEngine, anyio.Event] = {}
        self._is_recycling = False

    @property
    def num_slots_in_use(self) -> int:
        """Staging slots in use."""
        return self._table.num_slots_in_use

    def story_of(self, key: str) -> Story | None:
        """The story of the reads of a fetch, if there is one."""
        read = self._table.find(key)
        return None if read is None else read.story

    def read_chunk(self, command: ReadChunk) -> None:
        """Read a chunk by the path that was chosen for its fetch, or another if that has closed.

        It has ended at once when no path can be taken, or it is short.
        """
        key, fetch = command.fetch_id, self._active[command.fetch_id]
        try:
            chunk = make_chunk(fetch, command, one_in=self._one_in)
            choice = self._chooser.path_of(chunk)
            job_bytes, staging = self._agent.transport.limits.slice_bytes, self._agent.staging
            short = None
            if choice.path is Path.MAPPED:
                short = short_copy(chunk, job_bytes=job_bytes)
            if short is not None:
                self._copy_now(key, *short)
                return
            rounds = rounds_of(chunk, choice, job_bytes=job_bytes, staging=staging)
        except KVBusError as error:
            self._on_end(ReadEnded(key, 0, error))
            return
        engine, priority = chunk.route.engine, chunk.asked.priority
        self._dispatch(ev.ChunkWanted(key, engine, rounds, choice.path.value, priority))

    def stop(self) -> None:
        """The agent ends, and every read with it."""
        self._dispatch(Stopped())
        self._driver.stop()

    def lose_engine(self, engine: LocalEngine) -> None:
        """Stop the chunks of an engine that is gone."""
        self._dispatch(ev.EngineGone(engine, engine_lost()))

    async def reads_done(self, engine: LocalEngine) -> None:
        """Return when nothing can write into ``engine`` any more."""
        if self._table.num_reads(engine):
            self._driver.on_settled = self._check_idle
            await self._idle.setdefault(engine, anyio.Event()).wait()

    def _check_idle(self) -> None:
        """Only while there is a wait for an engine."""
        for engine in [one for one in self._idle if not self._table.num_reads(one)]:
            self._idle.pop(engine).set()
        if not self._idle:
            self._driver.on_settled = None

    def _end_stage(self, leg: Leg, num_bytes: int = 0, error: KVBusError | None = None) -> None:
        self._dispatch(StageEnded(leg, num_bytes, error))

    def _pack(self, leg: Leg, command: ev.Begin) -> None:
        """Ask for the box of a leg."""
        work: BoxJob = leg.work
        chunk, source = work.chunk, leg.source
        message = Pack(
            agent_boot=source.agent_boot,
            engine_id=chunk.route.prefill.engine_id,
            memory_id=source.memory_id,
            offer_id=chunk.ticket.offer_id,
            epoch=chunk.wanted.epoch,
            rank=work.share.holder,
            box=work.box,
            table=chunk.blocks_of(work.box),
            slot_lease_s=self._config.lease_s,
            token=chunk.wanted.token,
            access=source.access,
            done=command.done,
            priority=chunk.asked.priority,
        )
        timeout_s = max(1e-3, chunk.fetch.deadline - self._agent.loop.time())
        source.peer.ask(message, timeout_s, partial(self._on_packed, leg))

    def _on_packed(self, leg: Leg, packed: Packed | KVBusError) -> None:
        if not isinstance(packed, KVBusError) and packed.num_bytes != leg.work.num_bytes:
            _release(leg.source, (packed.slot_id,))
            packed = GeometryError(
                f"the prefill agent packed {packed.num_bytes} bytes, the box has "
                f"{leg.work.num_bytes}"
            )
        if isinstance(packed, KVBusError):
            self._end_stage(leg, error=packed)
            return
        leg.work.packed = packed
        self._dispatch(StageEnded(leg, 0, None, packed.slot_id, packed.slot_lease_s))

    def _read(self, leg: Leg, _: ev.Begin) -> None:
        """READ the rows of the leg; many descriptors are planned in a thread first."""
        work = leg.work
        if isinstance(work, DirectJob) and work.num_descriptors > MAX_INLINE_DESCRIPTORS:
            self._agent.tasks.start_soon(self._plan_aside, leg)
            return
        try:
            self._post(leg, work.rows(leg.slot))
        except KVBusError as error:
            self._end_stage(leg, error=error)

    async def _plan_aside(self, leg: Leg) -> None:
        async def plan() -> None:
            self._post(leg, await in_thread(leg.work.rows, leg.slot))

        await guarded(plan, lambda error: self._end_stage(leg, error=error))

    def _post(self, leg: Leg, rows: Rows) -> None:
        work, (descriptors, here, there) = leg.work, rows
        if work.aborted or not len(descriptors.local):
            self._end_stage(leg)
            return
        work.transfer = self._agent.transport.read(
            leg.source.nixl_agent,
            descriptors.local,
            descriptors.remote,
            on_end=partial(self._on_read, leg),
            local_memory=here,
            remote_memory=there,
            priority=work.chunk.asked.priority,
        )

    def _on_read(self, leg: Leg, outcome: ReadOutcome) -> None:
        leg.work.transfer = None  # it holds its descriptors
        error: KVBusError | None = outcome.error
        if outcome.status is ReadStatus.ABORTED:
            error = LocalError("the read was aborted", code=ErrorCode.CANCELLED)
        self._end_stage(leg, outcome.num_bytes, error)

    def _copy(self, leg: Leg, _: ev.Begin) -> None:
        """In threads: from a slot here into each rank, zeros, or from mapped memory."""
        work = leg.work
        turn, engine = work.chunk.turn, work.chunk.route.engine
        if isinstance(work, MappedJob):
            on_end = partial(self._count_mapped, work, partial(self._end_stage, leg))
            work.copying = self._agent.copiers.start_jobs(turn, work.jobs, on_end, engine=engine)
            return
        work.copying = self._agent.copiers.start(
            turn,
            lambda: (partial(work.copy, leg.slot),),
            partial(self._on_copied, leg),
            engine=engine,
            memories=work.ranks,
            group=work.group,
        )

    def _on_copied(self, leg: Leg, error: KVBusError | None) -> None:
        leg.work.copying = None
        self._end_stage(leg, error=error)

    def _copy_now(self, key: str, work: MappedJob, runs: Runs) -> None:
        """Nothing of it is in flight when this returns, so it needs no leg."""

        def end(num_bytes: int, error: KVBusError | None) -> None:
            path = Path.MAPPED.value if num_bytes else ""
            self._on_end(ReadEnded(key, num_bytes, error, path))

        turn, engine = work.chunk.turn, work.chunk.route.engine
        on_copied = partial(self._count_mapped, work, end)
        jobs = [partial(work.copy, runs)]
        self._agent.copiers.start_jobs(turn, lambda: jobs, on_copied, engine=engine, at_once=True)

    def _count_mapped(
        self,
        work: MappedJob,
        end: Callable[[int, KVBusError | None], None],
        error: KVBusError | None,
    ) -> None:
        """No job of it runs: what was read counts if it was there to the end.

        Else its agent is asked, which may know what has become of it.
        """
        work.copying = None
        loss, num_bytes = work.loss(), work.num_bytes
        if error is not None or loss is None:
            end(num_bytes, error)
            return

        def end_lost(answer: Empty | KVBusError) -> None:
            if isinstance(answer, KVBusError) and answer.code is not ErrorCode.TIMEOUT:
                end(num_bytes, answer)
            else:
                end(num_bytes, loss)

        source = work.plan.source
        source.peer.ask(source.check(work.chunk.ticket.offer_id), LOSS_KNOWN_WITHIN_S, end_lost)

    # What keeps NIXL from being made again within RECYCLED_WITHIN_S keeps it from all else, too:
    # then the process ends, and its READs with it. But while this machine's own link is down there
    # is no interface to make NIXL for: that is tried again.
    def _recycle(self, _: ev.RecycleTransport) -> None:
        """Some READs never end: have the transport made again, once at a time."""
        if not self._is_recycling:
            self._is_recycling = True
            self._agent.tasks.start_soon(self._end_all_reads)

    async def _end_all_reads(self) -> None:
        transport, data_plane = self._agent.transport, self._agent.data_plane
        interfaces = list(data_plane.interfaces)
        log.warning("transport.recycling", num_handles=transport.stats().outstanding_handles)
        is_unlinked = False
        while isinstance(ended := await self._try_to_recycle(), KVBusError):
            if not is_unlinked:
                log.warning("transport.unlinked", interfaces=interfaces, reason=ended.message)
            is_unlinked = True
            await anyio.sleep(AGAIN_S)
        if is_unlinked:
            log.info("transport.linked", interfaces=interfaces)
        log.warning("transport.recycled", num_handles=ended)
        await data_plane.end_if_exposed()
        self._is_recycling = False

    async def _try_to_recycle(self) -> int | TransferFailed:
        """How many handles it ended; an error while the link is down: then nothing has ended."""
        try:
            with anyio.fail_after(RECYCLED_WITHIN_S):
                recycled = self._agent.transport.recycle(grace_s=GRACE_S)
                return await asyncio.wrap_future(recycled)
        except (TimeoutError, KVBusError) as error:
            if isinstance(error, TransferFailed) and self._agent.data_plane.is_down():
                return error
            reason = str(error) or f"NIXL has kept its thread for {RECYCLED_WITHIN_S:g} s"
            log.critical("transport.stuck", reason=reason, exit_status=EXIT_STATUS)
            os._exit(EXIT_STATUS)


def _release(source: object, slot_ids: tuple[int, ...]) -> None:
    """Give slots back; when that fails they come back by themselves, with their lease."""
    if isinstance(source, Source):
        message = Unpack(agent_boot=source.agent_boot, slot_ids=slot_ids)
        source.peer.ask(message, UNPACK_TIMEOUT_S, lambda _: None)
