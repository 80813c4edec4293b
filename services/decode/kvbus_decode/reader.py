"""Reads chunks: a path, the legs of it, and what the read table says of them.

    read_chunk ─▶ path ─▶ legs ─▶ ReadTable ─▶ Begin: pack, READ, copy, compare
                                      ▲                        │
                                      └─── StageEnded ◀────────┘        ReadEnded ─▶ on_end

A direct chunk starts no task. A copy of mapped memory that takes some 0.1 ms is made at once, and
needs no leg in the table.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import anyio
import structlog

from kvbus.agent.engine import LocalEngine, engine_lost
from kvbus.agent.loop import failure, until
from kvbus.agent.service import Agent
from kvbus.agent.slots import HOST
from kvbus.errors import KVBusError, TransferFailed
from kvbus.planning import Path, Share, StagedPlan, cut_for_digests, cut_into_boxes
from kvbus.table import Driver, Story
from kvbus.table.events import Stopped
from kvbus_decode import read_table as ev
from kvbus_decode.box_legs import BoxLeg, CompareLeg, StagedLeg, ZeroLeg, release_slots
from kvbus_decode.chunk import ActiveFetch, Chunk, make_chunk
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch.events import ReadChunk, ReadEnded, StopReads
from kvbus_decode.legs import DirectLeg, MappedLeg, Means
from kvbus_decode.observe import DecodeMetrics
from kvbus_decode.paths import PathChoice, PathChooser
from kvbus_decode.route import Source
from kvbus_decode.route_book import RouteBook

log = structlog.get_logger()

SHORT_BYTES = 128 << 10
"""So many, in few runs, are copied on the event loop, in 30 to 130 µs with their plan; the way to a
thread and back takes 70.
"""
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
        routes: RouteBook,
        *,
        active: Mapping[str, ActiveFetch],
        on_end: Callable[[ReadEnded], None],
    ) -> None:
        self._agent, self._chooser, self._routes = agent, chooser, routes
        self._active, self._on_end, self._one_in = active, on_end, config.digest_one_in
        self._table = ev.ReadTable(config.read_limits(num_slots=agent.staging.num_slots))
        self._driver: Driver[ev.Event] = Driver(self._table, agent.loop, on_defect=failure)
        self._dispatch = self._driver.dispatch
        self._driver.commands |= {
            ev.Begin: lambda command: command.leg.begin(command),
            ev.Abort: lambda command: command.leg.abort(),
            ev.ReleaseSlots: lambda command: release_slots(command.source, command.slot_ids),
            ev.RecycleTransport: self._recycle,
        }
        self._driver.commands[ReadEnded] = on_end
        self._driver.answers[ev.Begin] = lambda command, error: ev.StageEnded(
            command.leg, error=failure(error)
        )
        digests = metrics.digests.values
        self._means = Means(agent, routes.nixl, self._dispatch, config.lease_s, digests)
        self._is_recycling = False

    @property
    def num_slots_in_use(self) -> int:
        return self._table.num_slots_in_use

    def story_of(self, key: str) -> Story | None:
        read = self._table.find(key)
        return None if read is None else read.story

    def read_chunk(self, command: ReadChunk) -> None:
        """Read a chunk by the path that was chosen for its fetch, or another if that has closed.

        It has ended at once when no path can be taken, or it is short.
        """
        key = command.fetch_id
        try:
            chunk = make_chunk(self._active[key], command, one_in=self._one_in)
            choice = self._chooser.path_of(chunk)
            if choice.path is Path.MAPPED and self._copies_now(chunk):
                return
            first = list(self._legs_of(chunk, choice))
            later = list(self._zero_legs(chunk)), list(self._compare_legs(chunk, choice.path))
        except Exception as error:  # nothing of it has begun
            self._on_end(ReadEnded(key, 0, failure(error)))
            return
        rounds = tuple(map(tuple, (first, *filter(None, later))))
        engine, priority = chunk.route.engine, chunk.asked.priority
        self._dispatch(ev.ChunkWanted(key, engine, rounds, choice.path.value, priority))

    def stop_reads(self, command: StopReads) -> None:
        """Begin nothing more of a fetch's chunk."""
        self._dispatch(command)

    def stop(self) -> None:
        self._dispatch(Stopped())
        self._driver.stop()

    def lose_engine(self, engine: LocalEngine) -> None:
        self._dispatch(ev.EngineGone(engine, engine_lost()))

    async def reads_done(self, engine: LocalEngine) -> None:
        """Return when nothing can write into ``engine`` any more."""
        await until(lambda: not self._table.num_reads(engine))

    def _copies_now(self, chunk: Chunk) -> bool:
        """Copy a chunk of mapped memory where the way to a thread takes longer than that.

        Nothing of it is in flight then, so the table has no leg of it. Raises as `MappedLeg.runs`.
        """
        plans = chunk.plans
        if len(plans) != 1 or chunk.tail or chunk.one_in or chunk.num_bytes > SHORT_BYTES:
            return False
        leg = MappedLeg(chunk=chunk, means=self._means, plan=plans[0])
        runs = leg.runs()
        if runs.lattices:
            return False

        def end(num_bytes: int, error: KVBusError | None) -> None:
            path = Path.MAPPED.value if num_bytes else ""
            self._on_end(ReadEnded(chunk.fetch.key, num_bytes, error, path))

        leg.copy_at_once(runs, end)
        return True

    def _legs_of(self, chunk: Chunk, choice: PathChoice) -> Iterator[ev.Leg]:
        """Those that bring the bytes: one for each source, or for each box.

        Raises `GeometryError` when a box is too small for anything, and as `StagingDevices.at`.
        """
        if choice.path in (Path.STAGED, Path.PACKED):
            yield from self._box_legs(chunk, choice)
            return
        kind = DirectLeg if choice.path is Path.DIRECT else MappedLeg
        for plan in chunk.plans:
            yield kind(source=plan.source, chunk=chunk, means=self._means, plan=plan)

    def _box_legs(self, chunk: Chunk, choice: PathChoice) -> Iterator[ev.Leg]:
        """One leg for each box; those of different sources and ranks take turns."""
        queues, box_bytes = deque[Iterator[ev.Leg]](), choice.box_bytes
        for plan in chunk.plans:
            if choice.path is Path.STAGED:
                legs = self._staged_legs
                queues += (legs(chunk, plan.source, one, box_bytes) for one in plan.staged)
            else:
                legs_of = self._legs_of_share
                queues += (legs_of(chunk, plan.source, one, box_bytes) for one in plan.joined)
        while queues:
            queue = queues.popleft()
            if (leg := next(queue, None)) is not None:
                yield leg
                queues.append(queue)

    def _staged_legs(
        self, chunk: Chunk, source: Source, plan: StagedPlan, box_bytes: int
    ) -> Iterator[ev.Leg]:
        slots = self._agent.staging.at(HOST)
        for box in plan.boxes(chunk.spans[plan.group], box_bytes=box_bytes):
            yield StagedLeg(
                source=source,
                device=HOST,
                chunk=chunk,
                means=self._means,
                plan=plan,
                box=box,
                slots=slots,
            )

    def _legs_of_share(
        self, chunk: Chunk, source: Source, share: Share, box_bytes: int
    ) -> Iterator[ev.Leg]:
        """A packed box is for all ranks that want the same and have their slots on one device."""
        group = chunk.route.readers[share.reader].engine.group(share.group)
        device, span = chunk.route.engine.ranks[share.reader].device, chunk.spans[share.group]
        slots = self._agent.staging.at(device)
        for box in cut_into_boxes(share, group, span, box_bytes=box_bytes):
            yield BoxLeg(
                source=source,
                device=device,
                chunk=chunk,
                means=self._means,
                share=share,
                group=group,
                box=box,
                slots=slots,
            )

    def _zero_legs(self, chunk: Chunk) -> Iterator[ev.Leg]:
        """One leg for each rank that holds a group with a tail."""
        engine = chunk.route.engine
        for name, span in chunk.tail.items():
            for rank in engine.ranks.values():
                if name in rank.num_blocks:
                    group = engine.spec.group(name)
                    yield ZeroLeg(chunk=chunk, means=self._means, rank=rank, group=group, span=span)

    def _compare_legs(self, chunk: Chunk, path: Path) -> Iterator[ev.Leg]:
        """Legs that compare each rank with where its bytes were read."""
        for plan in chunk.plans if chunk.one_in else ():
            for share in plan.joined if path is Path.PACKED else plan.shares:
                for box in cut_for_digests(share, chunk.spans[share.group]):
                    yield CompareLeg(
                        source=plan.source, chunk=chunk, means=self._means, share=share, box=box
                    )

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
        await data_plane.end_once_exposed()
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
