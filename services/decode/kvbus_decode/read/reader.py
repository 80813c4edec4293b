"""Carries out what the read table says: one small method for each stage of a leg.

    start ─▶ path ─▶ legs ─▶ ReadTable ─▶ Begin: pack, READ, copy, compare
                                 ▲                        │
                                 └─── StageEnded ◀────────┘        ReadEnded ─▶ on_end

A direct chunk starts no task. READs happen on the transport's thread, copies in threads of their
own; READs of many descriptors are planned in a thread as well. A copy of mapped memory that takes
some 0.1 ms is made at once, and needs no leg.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import anyio

from kvbus.agent.copiers import Copiers
from kvbus.agent.engines import LocalEngine, engine_lost
from kvbus.agent.loop import guarded, in_thread
from kvbus.agent.service import Agent
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError
from kvbus.planning import Path, chunk_spans
from kvbus.protocol.peer import Pack, Packed, Unpack
from kvbus.table import Driver, Story
from kvbus.table.events import Stopped
from kvbus.transport import ReadOutcome, ReadStatus
from kvbus_decode.active import ActiveFetch
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch.events import ReadChunk, ReadEnded, Requested
from kvbus_decode.observe import DecodeMetrics
from kvbus_decode.peer.memory_check import check_memory
from kvbus_decode.peer.route import Route, Source
from kvbus_decode.read import table as ev
from kvbus_decode.read.chunk import make_chunk
from kvbus_decode.read.compare import Comparison
from kvbus_decode.read.legs import (
    BoxJob,
    DirectJob,
    MappedJob,
    Rows,
    box_legs,
    compare_legs,
    direct_legs,
    mapped_jobs,
    mapped_legs,
    zero_legs,
)
from kvbus_decode.read.paths import PathChoice, PathChooser
from kvbus_decode.read.recycling import Recycling
from kvbus_decode.read.table import ReadTable, Stage, StageEnded

MAX_INLINE_DESCRIPTORS = 16_384
LOSS_KNOWN_WITHIN_S = 2.0
UNPACK_TIMEOUT_S = 5.0
WARM_TOKENS = 2048
"""Of a fetch that is yet to come."""


class Reader:
    """All chunks that are read by this agent, for the fetches in ``active``.

    ``on_end`` is called once for each, when nothing can write into the blocks for it any more.
    """

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        metrics: DecodeMetrics,
        active: Mapping[str, ActiveFetch],
        on_end: Callable[[ReadEnded], None],
    ) -> None:
        self._agent, self._config = agent, config
        self._active, self._on_end = active, on_end
        self._copiers = Copiers(
            agent.loop, num_threads=config.copy_threads, new_executor=agent.new_executor
        )
        self._chooser = PathChooser(agent, config)
        self._table = ReadTable(config.read_limits(num_slots=agent.staging.num_slots))
        self._driver: Driver[ev.Event] = Driver(self._table, agent.loop)
        self._dispatch = self._driver.dispatch
        self._begin_stage: dict[Stage, Callable[[ev.Begin], None]] = {
            Stage.PACK: self._pack,
            Stage.READ: self._read,
            Stage.COPY: self._copy,
            Stage.COMPARE: Comparison(agent, self._copiers, metrics, self._dispatch).start,
        }
        self._driver.commands |= {
            ev.Begin: lambda command: self._begin_stage[command.stage](command),
            ev.Abort: lambda command: command.leg.work.abort(),
            ev.ReleaseSlots: lambda command: _release(command.source, command.slot_ids),
            ev.RecycleTransport: Recycling(agent).begin,
            ReadEnded: on_end,
        }
        self.stop_reads = self._dispatch
        self._idle: dict[LocalEngine, anyio.Event] = {}

    @property
    def num_slots_in_use(self) -> int:
        """Staging slots in use."""
        return self._table.num_slots_in_use

    @property
    def num_copies(self) -> int:
        """Copies into engines' memory that have not ended."""
        return self._copiers.num_running

    def story_of(self, key: str) -> Story | None:
        """The story of the reads of a key, if there is one."""
        read = self._table.find(key)
        return None if read is None else read.story

    def choose(self, route: Route, first_token: int, num_tokens: int) -> PathChoice | None:
        """How a fetch of these tokens is read; None when no path can be taken: `start` says why."""
        whole = first_token, num_tokens
        groups = route.engine.spec.groups
        spans = chunk_spans(groups, route.prefill.groups, whole, whole, last=True)
        try:
            return self._chooser.choose(route, spans, replica_index=0)
        except KVBusError:
            return None

    # The import of torch takes a second or more, and stops the event loop for a part of it. So it
    # comes before the claim of the first fetch that will need it: under the lease, a renewal would
    # be late, and a prefill agent whose lease is over drives no progress, without which a READ
    # over TCP never ends.
    def is_ready(self, choice: PathChoice | None, requested: Requested) -> bool:
        """Whether the fetch copies nothing here, or its copies could start at once."""
        if self._copiers.ready:
            return True
        return not requested.asked.zero_tail and (choice is None or choice.path is not Path.PACKED)

    def expect(self, engine: LocalEngine) -> None:
        """Fetches of a new engine will come: its copies shall not wait for torch."""
        self._copiers.prepare_for(engine)

    async def prepare(self, route: Route, requested: Requested) -> PathChoice | None:
        """How the fetch is read, once `is_ready` is true of it."""
        asked = requested.asked
        choice = self.choose(route, asked.first_token, asked.num_tokens)
        if not self.is_ready(choice, requested):
            await asyncio.wrap_future(self._copiers.prepare())
        return choice

    async def warm_up(self, route: Route) -> None:
        """Return when the first fetch on a route finds ready what its copies need."""
        choice = self.choose(route, 0, WARM_TOKENS)
        if choice is not None and choice.path is Path.PACKED:
            await asyncio.wrap_future(self._copiers.prepare())

    def read_chunk(self, command: ReadChunk) -> None:
        """Read a chunk by the path that was chosen for its fetch, or another if that has closed.

        It has ended at once when no path can be taken, or it is short.
        """
        key, fetch = command.fetch_id, self._active[command.fetch_id]
        try:
            chunk = make_chunk(fetch, command, one_in=self._config.digest_one_in)
            choice = self._chooser.still(fetch.choice, chunk)
            if choice.path is Path.DIRECT:
                legs = direct_legs(chunk)
            elif choice.path is Path.MAPPED:
                jobs = mapped_jobs(chunk, job_bytes=self._agent.transport.limits.slice_bytes)
                if len(jobs) == 1 and jobs[0].is_short and not (chunk.tail or chunk.one_in):
                    self._copy_now(key, jobs[0])
                    return
                legs = mapped_legs(jobs)
            else:
                staging, box_bytes = self._agent.staging, choice.box_bytes
                legs = box_legs(chunk, choice.path, box_bytes=box_bytes, staging=staging)
                if choice.path is Path.PACKED:
                    self._copiers.prepare()
            compare = compare_legs(chunk, choice.path)
        except KVBusError as error:
            self._on_end(ReadEnded(key, 0, error))
            return
        later = (tuple(one) for one in (zero_legs(chunk), compare) if one)
        rounds, engine = (tuple(legs), *later), chunk.route.engine
        self._dispatch(ev.ChunkWanted(key, engine, rounds, choice.path.value, chunk.priority))

    def stop(self) -> None:
        """The agent ends, and every read with it."""
        self._dispatch(Stopped())
        self._driver.stop()

    def lose_engine(self, engine: LocalEngine) -> None:
        """Stop the chunks of an engine that is gone; no copy for it starts."""
        self._copiers.forget(engine)
        self._dispatch(ev.EngineGone(engine, engine_lost()))

    async def copies_done(self, engine: LocalEngine) -> None:
        """Return when no thread copies into ``engine``, which is lost."""
        await self._copiers.quiesce(engine)

    async def reads_done(self, engine: LocalEngine) -> None:
        """Return when nothing can write into ``engine`` any more."""
        if self._table.num_reads(engine):
            self._driver.on_settled = self._check_idle
            await self._idle.setdefault(engine, anyio.Event()).wait()

    def _check_idle(self) -> None:
        """Only while something waits for an engine."""
        for engine in [one for one in self._idle if not self._table.num_reads(one)]:
            self._idle.pop(engine).set()
        if not self._idle:
            self._driver.on_settled = None

    def _end_stage(
        self, command: ev.Begin, num_bytes: int = 0, error: KVBusError | None = None
    ) -> None:
        self._dispatch(StageEnded(command.key, command.leg, num_bytes, error))

    def _pack(self, command: ev.Begin) -> None:
        """Ask for the box of a leg; what its READs are is found out meanwhile."""
        leg = command.leg
        work: BoxJob = leg.work
        chunk, source = work.chunk, work.source
        message = Pack(
            agent_boot=source.agent_boot,
            engine_id=chunk.route.prefill.engine_id,
            memory_id=source.memory_id,
            offer_id=chunk.offer_id,
            epoch=chunk.epoch,
            rank=work.share.holder,
            box=work.box,
            order=work.order,
            table=work.blocks(),
            slot_lease_s=self._config.lease_s,
            token=chunk.token,
            access=source.access,
            done=command.done,
            priority=chunk.priority,
        )
        timeout_s = max(1e-3, chunk.deadline - self._agent.loop.time())
        source.peer.ask(message, timeout_s, partial(self._on_packed, command))
        if not leg.needs_slot:
            try:
                work.reads = work.block_reads()
            except KVBusError as error:
                self._end_stage(command, error=error)

    def _on_packed(self, command: ev.Begin, packed: Packed | KVBusError) -> None:
        leg = command.leg
        if not isinstance(packed, KVBusError) and packed.num_bytes != leg.work.num_bytes:
            _release(leg.source, (packed.slot_id,))
            packed = GeometryError(
                f"the prefill agent packed {packed.num_bytes} bytes, the box has "
                f"{leg.work.num_bytes}"
            )
        if isinstance(packed, KVBusError):
            self._end_stage(command, error=packed)
            return
        leg.work.packed = packed
        slot = packed.slot_id, packed.slot_lease_s
        self._dispatch(StageEnded(command.key, leg, 0, None, *slot))

    def _read(self, command: ev.Begin) -> None:
        """READ the rows of the leg; many descriptors are planned in a thread first."""
        work = command.leg.work
        if isinstance(work, DirectJob) and work.num_descriptors > MAX_INLINE_DESCRIPTORS:
            self._agent.tasks.start_soon(self._plan_aside, command)
            return
        try:
            self._post(command, work.rows(command.leg.slot))
        except KVBusError as error:
            self._end_stage(command, error=error)

    async def _plan_aside(self, command: ev.Begin) -> None:
        async def plan() -> None:
            leg = command.leg
            self._post(command, await in_thread(leg.work.rows, leg.slot))

        await guarded(plan, lambda error: self._end_stage(command, error=error))

    def _post(self, command: ev.Begin, rows: Rows) -> None:
        work, (descriptors, here, there) = command.leg.work, rows
        if work.aborted or not len(descriptors.local):
            self._end_stage(command)
            return
        work.transfer = self._agent.transport.read(
            work.source.nixl_agent,
            descriptors.local,
            descriptors.remote,
            on_end=partial(self._on_read, command),
            local_memory=here,
            remote_memory=there,
            priority=work.chunk.priority,
        )

    def _on_read(self, command: ev.Begin, outcome: ReadOutcome) -> None:
        command.leg.work.transfer = None  # it holds its descriptors
        error: KVBusError | None = outcome.error
        if outcome.status is ReadStatus.ABORTED:
            error = LocalError("the read was aborted", code=ErrorCode.CANCELLED)
        self._end_stage(command, outcome.num_bytes, error)

    def _copy(self, command: ev.Begin) -> None:
        """In threads: from a slot of ours into each rank, zeros, or from mapped memory."""
        leg, work = command.leg, command.leg.work
        turn, engine = work.chunk.turn, work.chunk.route.engine
        if isinstance(work, MappedJob):
            end = partial(self._end_stage, command)
            on_end = partial(self._count_mapped, work, end)
            work.copying = self._copiers.start_jobs(turn, work.jobs, on_end, engine=engine)
            return
        work.copying = self._copiers.start(
            turn,
            partial(work.copy, leg.slot),
            partial(self._on_copied, command),
            engine=engine,
            memories=work.ranks,
            group=work.group,
        )

    def _on_copied(self, command: ev.Begin, error: KVBusError | None) -> None:
        command.leg.work.copying = None
        self._end_stage(command, error=error)

    def _copy_now(self, key: str, work: MappedJob) -> None:
        """Nothing of it is in flight when this returns, so it needs no leg."""

        def end(num_bytes: int, error: KVBusError | None) -> None:
            path = Path.MAPPED.value if num_bytes else ""
            self._on_end(ReadEnded(key, num_bytes, error, path))

        turn, engine = work.chunk.turn, work.chunk.route.engine
        on_copied = partial(self._count_mapped, work, end)
        self._copiers.start_jobs(turn, work.jobs, on_copied, engine=engine, at_once=True)

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

        def end_lost(answer: KVBusError | None) -> None:
            end(num_bytes, loss if answer is None or answer.code is ErrorCode.TIMEOUT else answer)

        chunk, sources = work.chunk, (work.plan.source,)
        check_memory(
            chunk.route, sources, chunk.offer_id, timeout_s=LOSS_KNOWN_WITHIN_S, on_end=end_lost
        )


def _release(source: object, slot_ids: tuple[int, ...]) -> None:
    """Give slots back; when that fails they come back by themselves, with their lease."""
    if isinstance(source, Source):
        message = Unpack(agent_boot=source.agent_boot, slot_ids=slot_ids)
        source.peer.ask(message, UNPACK_TIMEOUT_S, lambda _: None)
