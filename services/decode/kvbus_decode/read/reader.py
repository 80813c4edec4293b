"""Carries out what the read table says: one small method for each command.

    start ─▶ path ─▶ legs ─▶ ReadTable ─▶ AskPack, PostRead, StartCopy, AskDelegate, ...
                                 ▲                        │
                                 └──── what came of it ◀──┘        ChunkEnded ─▶ on_end

A direct chunk starts no task. READs happen on the transport's thread, copies in threads of their
own, but for those of mapped memory that take some 0.1 ms; READs of many descriptors are planned in
a thread as well.
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import anyio

from kvbus.agent.engines.local_engine import LocalEngine, engine_lost
from kvbus.agent.process.guard import guarded
from kvbus.agent.process.loop import in_thread
from kvbus.agent.process.service import Agent
from kvbus.agent.staging.copiers import Copiers
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.planning import Overlaps, Path, Rates, chunk_spans
from kvbus.table import Driver, Story
from kvbus.transport import ReadOutcome, ReadStatus
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch.events import Requested
from kvbus_decode.metrics import DecodeMetrics
from kvbus_decode.peer.directory import PeerDirectory
from kvbus_decode.peer.memory_check import check_memory
from kvbus_decode.peer.route import Route
from kvbus_decode.read import events as ev
from kvbus_decode.read.chunk import Chunk
from kvbus_decode.read.compare import Comparison
from kvbus_decode.read.jobs import DirectJob, MappedJob, Rows
from kvbus_decode.read.leg import Leg
from kvbus_decode.read.legs import box_legs, compare_legs, direct_legs, mapped_legs, zero_legs
from kvbus_decode.read.pack_client import PackClient
from kvbus_decode.read.path_choice import WITHOUT_BOXES, PathChoice, PathChooser
from kvbus_decode.read.recycling import Recycling
from kvbus_decode.read.remote_ranks import RemoteRanks
from kvbus_decode.read.table import ReadTable

MAX_INLINE_DESCRIPTORS = 16_384
LOSS_KNOWN_WITHIN_S = 2.0
WARM_TOKENS = 2048
"""Of a fetch that is yet to come."""

OnEnd = Callable[[ev.ChunkEnded], None]


class Reader:
    """All chunks that are read by this agent, for fetches and for other agents.

    ``on_trouble`` is told why a read will fail that does not end yet, by its key.
    """

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        peers: PeerDirectory,
        metrics: DecodeMetrics,
        on_trouble: Callable[[Hashable, KVBusError], None],
    ) -> None:
        self._agent = agent
        self._copiers = Copiers(
            agent.loop, num_threads=config.copy_threads, new_executor=agent.new_executor
        )
        self._chooser = PathChooser(agent, config)
        self._table = ReadTable(config.read_limits(num_slots=agent.staging.num_slots))
        self._driver: Driver[ev.Event] = Driver(self._table, agent.loop)
        self._dispatch = self._driver.dispatch
        packs = PackClient(agent, config, self._dispatch)
        remote = RemoteRanks(agent, config, peers, self._dispatch, on_trouble)
        self._compare = Comparison(agent, self._copiers, metrics, self._dispatch)
        self._driver.commands |= {
            ev.AskPack: packs.ask,
            ev.ReleaseSlots: packs.release,
            ev.PostRead: self._post,
            ev.StartCopy: self._start_copy,
            ev.AskDelegate: remote.ask,
            ev.AskDigests: self._compare.ask,
            ev.StartCompare: self._compare.start,
            ev.AbortRead: self._abort,
            ev.RecycleTransport: Recycling(agent).begin,
            ev.AbortCopy: self._abort_copy,
            ev.StopDelegate: remote.abort,
            ev.ChunkEnded: self._end,
        }
        self._reads: dict[Hashable, tuple[Chunk, PathChoice, OnEnd]] = {}
        self._overlaps = Overlaps()
        self._idle: dict[LocalEngine, anyio.Event] = {}

    @property
    def num_slots_in_use(self) -> int:
        """Staging slots in use."""
        return self._table.num_slots_in_use

    @property
    def rates(self) -> Rates:
        """Of this machine, as far as they were measured."""
        return self._chooser.rates

    @property
    def num_copies(self) -> int:
        """Copies into engines' memory that have not ended."""
        return self._copiers.num_running

    def story(self, key: Hashable) -> list[str]:
        """What happened to the reads of a key, a line for each event."""
        return self._table.story(key)

    def story_of(self, key: Hashable) -> Story | None:
        """The story of the reads of a key, if there is one."""
        read = self._table.find(key)
        return None if read is None else read.story

    def stories_for_others(self, fetch_id: str) -> list[Story]:
        """The stories of the reads for fetches of other agents, which have this id there."""
        return [read.story for read in self._table.named(fetch_id)]

    # The import of torch takes a second or more, and stops the event loop for a part of it. So it
    # comes before the claim of the first fetch that will need it: under the lease, a renewal would
    # be late, and a prefill agent whose lease is over drives no progress, without which a READ
    # over TCP never ends.
    def is_ready(self, route: Route, requested: Requested) -> bool:
        """Whether the fetch copies nothing here, or its copies could start at once.

        Also when no path can be taken: `start` says why.
        """
        if self._copiers.ready:
            return True
        if requested.zero_tail:
            return False
        return self._path_of_all(route, requested) is not Path.PACKED

    def path_without_lease(self, route: Route, requested: Requested) -> Path | None:
        """The path of a fetch that is read whole, if that needs no slot of the prefill agent."""
        path = self._path_of_all(route, requested)
        return path if path in WITHOUT_BOXES else None

    def _path_of_all(self, route: Route, requested: Requested) -> Path | None:
        """The path that all of the fetch would take now; None when there is none."""
        return self.path_of(route, requested.first_token, requested.num_tokens)

    def path_of(self, route: Route, first_token: int, num_tokens: int) -> Path | None:
        """The path that a fetch of these tokens would take now; None when there is none."""
        whole = first_token, num_tokens
        groups = route.engine.spec.groups
        spans = chunk_spans(groups, route.prefill.groups, whole, whole, last=True)
        try:
            return self._chooser.choose(route, spans, replica_index=0).path
        except KVBusError:
            return None

    def expect(self, engine: LocalEngine) -> None:
        """Fetches of a new engine will come: its copies shall not wait for torch."""
        self._copiers.prepare_for(engine)

    async def prepare(self, route: Route, requested: Requested) -> None:
        """Return when `is_ready` is true of the fetch."""
        if not self.is_ready(route, requested):
            await asyncio.wrap_future(self._copiers.prepare())

    async def warm_up(self, route: Route) -> None:
        """Return when the first fetch on a route finds ready what its copies need."""
        if self.path_of(route, 0, WARM_TOKENS) is Path.PACKED:
            await asyncio.wrap_future(self._copiers.prepare())

    def start(
        self,
        key: Hashable,
        chunk: Chunk,
        on_end: OnEnd,
        *,
        remote_legs: Sequence[Leg] = (),
        deadline: float | None = None,
    ) -> None:
        """Read a chunk by the path that `PathChooser` names.

        ``on_end`` is called once, when nothing can write into the blocks for it any more; at once
        when no path can be taken. ``remote_legs`` are parts that other agents read.
        """
        try:
            leased, replica_index = chunk.epoch > 0, chunk.replica_index
            choice = self._chooser.choose(chunk.route, chunk.spans, replica_index, leased=leased)
            if choice.path is Path.DIRECT:
                legs = direct_legs(chunk)
            elif choice.path is Path.MAPPED:
                legs = mapped_legs(chunk, job_bytes=self._agent.transport.limits.slice_bytes)
            else:
                staging, box_bytes = self._agent.staging, choice.box_bytes
                legs = box_legs(chunk, choice.path, box_bytes=box_bytes, staging=staging)
                if choice.path is Path.PACKED:
                    self._copiers.prepare()
            legs = [*compare_legs(chunk, choice.path), *legs]
        except KVBusError as error:
            on_end(ev.ChunkEnded(key, 0, "", 0.0, error))
            return
        self._reads[key] = chunk, choice, on_end
        self._overlaps.begin(key)
        last_legs = tuple(zero_legs(chunk)) if chunk.tail else ()
        engine, path, legs = chunk.route.engine, choice.path.value, [*remote_legs, *legs]
        self._dispatch(
            ev.ChunkWanted(key, engine, tuple(legs), last_legs, path, deadline, chunk.priority)
        )

    def stop_read(self, key: Hashable, error: KVBusError) -> None:
        """Nobody wants the chunk any more; its end follows."""
        self._dispatch(ev.ReadStopped(key, error))

    def stop(self) -> None:
        """The agent ends, and every read with it."""
        self._dispatch(ev.Stopped())
        self._driver.stop()

    def lose_engine(self, engine: LocalEngine) -> None:
        """Nobody wants the chunks of an engine that is gone, and no copy for it starts."""
        self._copiers.forget(engine)
        self._compare.forget(engine)
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
        """Only while somebody waits for an engine."""
        for engine in [one for one in self._idle if not self._table.num_reads(one)]:
            self._idle.pop(engine).set()
        if not self._idle:
            self._driver.on_settled = None

    def _end(self, ended: ev.ChunkEnded) -> None:
        chunk, choice, on_end = self._reads.pop(ended.key)
        was_alone = self._overlaps.end(ended.key)
        on_end(ended)
        if ended.error is None and choice.shape is not None and was_alone:
            # after the confirm has been sent, which is worth more
            self._agent.loop.call_soon(self._chooser.observe, chunk.route, choice, ended.seconds)

    def _post(self, command: ev.PostRead, rows: Rows | None = None) -> None:
        """READ ``rows``, those of the leg; many descriptors are planned in a thread first."""
        leg, work = command.leg, command.leg.work
        is_direct = isinstance(work, DirectJob)
        if rows is None and is_direct and work.num_descriptors > MAX_INLINE_DESCRIPTORS:
            self._agent.tasks.start_soon(self._plan_aside, command)
            return
        try:
            descriptors, here, there = rows or work.rows(leg.slot)
            if work.aborted or not len(descriptors.local):
                self._dispatch(ev.ReadEnded(command.key, leg))
                return
            work.transfer = self._agent.transport.read(
                work.source.nixl_agent,
                descriptors.local,
                descriptors.remote,
                on_end=partial(self._on_read, command, self._agent.loop.time()),
                local_memory=here,
                remote_memory=there,
                priority=work.chunk.priority,
            )
        except KVBusError as error:
            self._dispatch(ev.ReadEnded(command.key, leg, 0, error))

    async def _plan_aside(self, command: ev.PostRead) -> None:
        async def plan() -> None:
            leg = command.leg
            self._post(command, await in_thread(leg.work.rows, leg.slot))

        def fail(error: KVBusError) -> None:
            self._dispatch(ev.ReadEnded(command.key, command.leg, 0, error))

        await guarded(plan, fail)

    def _on_read(self, command: ev.PostRead, posted_at: float, outcome: ReadOutcome) -> None:
        work, seconds = command.leg.work, self._agent.loop.time() - posted_at
        work.transfer = None  # it holds its descriptors
        error: KVBusError | None = outcome.error
        if outcome.status is ReadStatus.ABORTED:
            error = _aborted("read")
        self._dispatch(ev.ReadEnded(command.key, command.leg, outcome.num_bytes, error))
        if error is None:
            self._chooser.observe_read(work.chunk.route, outcome, seconds)

    def _abort(self, command: ev.AbortRead) -> None:
        work = command.leg.work
        work.aborted = True
        if work.transfer is not None:
            work.transfer.abort()

    def _start_copy(self, command: ev.StartCopy) -> None:
        """From a slot of ours into each rank, zeros, or from mapped memory: in threads, unless that
        is very short.
        """
        leg, work = command.leg, command.leg.work
        if isinstance(work, MappedJob):
            work.copying = self._copiers.start_jobs(
                work.jobs,
                partial(self._on_mapped_copied, command, work),
                engine=work.chunk.route.engine,
                at_once=work.is_short,
                priority=work.chunk.priority,
            )
            return
        work.copying = self._copiers.start(
            partial(work.copy, leg.slot),
            partial(self._on_copied, command),
            engine=work.chunk.route.engine,
            memories=work.ranks,
            group=work.group,
            priority=work.chunk.priority,
        )

    def _abort_copy(self, command: ev.AbortCopy) -> None:
        """What has not begun is not done."""
        copying = command.leg.work.copying
        if copying is not None:
            copying.stop(_aborted("copy"))

    def _on_mapped_copied(
        self, command: ev.StartCopy, work: MappedJob, error: KVBusError | None
    ) -> None:
        """No job of it runs: what was read counts if it was there to the end.

        Else its agent is asked, who may know what has become of it.
        """
        work.copying = None
        loss, num_bytes = work.loss(), work.num_bytes

        def end(error: KVBusError | None) -> None:
            self._dispatch(ev.CopyEnded(command.key, command.leg, num_bytes, error))

        def end_lost(answer: KVBusError | None) -> None:
            end(loss if answer is None or answer.code is ErrorCode.TIMEOUT else answer)

        if error is not None or loss is None:
            end(error)
            return
        chunk, sources = work.chunk, (work.plan.source,)
        check_memory(
            chunk.route, sources, chunk.offer_id, timeout_s=LOSS_KNOWN_WITHIN_S, on_end=end_lost
        )

    def _on_copied(self, command: ev.StartCopy, error: KVBusError | None) -> None:
        command.leg.work.copying = None
        self._dispatch(ev.CopyEnded(command.key, command.leg, error=error))


def _aborted(what: str) -> LocalError:
    return LocalError(f"the {what} was aborted", code=ErrorCode.CANCELLED)
