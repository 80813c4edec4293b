"""Chunk reads: path, transfers, and the read table that schedules them."""

from collections import deque
from collections.abc import Iterator
from functools import partial

import structlog

from kvbus.agent.local_engine import LocalEngine, engine_lost
from kvbus.agent.loop import failure, until
from kvbus.agent.service import Agent
from kvbus.data.messages import HOST
from kvbus.planning import Path, Share, cut_for_digests, cut_into_tiles
from kvbus.table.events import Stopped
from kvbus.table.table import Driver, History, Promise
from kvbus_decode import read_table as ev
from kvbus_decode.chunk import Chunk, make_chunk
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch.events import Event as FetchEvent
from kvbus_decode.fetch.events import ReadChunk, ReadEnded, StopReads
from kvbus_decode.fetch_reports import DecodeMetrics
from kvbus_decode.paths import PathChooser
from kvbus_decode.remote_agent import Source
from kvbus_decode.route import PathChoice, SourcePlan
from kvbus_decode.tile_transfers import (
    CompareWork,
    OrderWork,
    PackedWork,
    StagedWork,
    ZeroWork,
    release_slots,
)
from kvbus_decode.transfers import DirectWork, MappedWork, StageRunner, TransferContext

log = structlog.get_logger()

SHORT_BYTES = 128 << 10
"""Largest copy on the event loop: 30 to 130 µs, less than a round trip to the data process."""
GRACE_S = 2.0
"""Time for other jobs to end before the data process is replaced."""


class Reader:
    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        chooser: PathChooser,
        metrics: DecodeMetrics,
    ) -> None:
        self._agent, self._chooser = agent, chooser
        self._one_in = config.digest_one_in
        self._reading: dict[str, Promise[FetchEvent]] = {}
        self._table = ev.ReadTable(config.read_limits(num_slots=agent.staging.num_slots))
        self._driver: Driver[ev.Event] = Driver(self._table, agent.loop, on_defect=failure)
        self._dispatch = self._driver.dispatch
        context = TransferContext(agent, config.lease_s, metrics.digests.values)
        runner = StageRunner(context)
        self._driver.commands |= {
            ev.AbortTransfer: lambda command: runner.abort(command.transfer),
            ev.ReleaseSlots: lambda command: release_slots(command.source, command.slot_ids),
            ev.ReplaceDataProcess: self._replace_data_process,
        }
        self._driver.commands[ReadEnded] = self._on_end
        self._driver.promise(ev.Begin, runner.begin, _stage_failed)

    @property
    def num_slots_in_use(self) -> int:
        return self._table.num_slots_in_use

    def history_of(self, key: str) -> History | None:
        read = self._table.find(key)
        return None if read is None else read.history

    def read_chunk(self, command: ReadChunk, promise: Promise[FetchEvent]) -> None:
        """Read a chunk; keep the promise when no write is in flight."""
        key, chunk = command.requested.fetch_id, make_chunk(command, one_in=self._one_in)
        choice = self._chooser.path_of(chunk)
        order = list(_order_transfers(chunk)) if chunk.wanted.after else []
        is_ready = choice.path is Path.MAPPED and not order
        if is_ready and (num_bytes := self._copy_here(chunk)) is not None:
            promise(ReadEnded(key, num_bytes, None, Path.MAPPED.value if num_bytes else ""))
            return
        read = list(self._transfers_of(chunk, choice))
        later = list(self._zero_transfers(chunk)), list(self._compare_transfers(chunk, choice.path))
        rounds = [one for one in (order, read, *later) if one]
        self._reading[key] = promise
        self._dispatch(
            ev.ChunkWanted(
                key,
                chunk.route.engine,
                rounds=tuple(map(tuple, rounds)),
                path=choice.path.value,
                priority=chunk.request.priority,
                nixl_agent="" if choice.path is Path.MAPPED else chunk.route.home.nixl_agent,
            )
        )

    def _on_end(self, ended: ReadEnded) -> None:
        self._reading.pop(ended.fetch_id)(ended)

    def stop_reads(self, command: StopReads) -> None:
        self._dispatch(command)

    def stop(self) -> None:
        self._dispatch(Stopped())
        self._driver.stop()

    def lose_engine(self, engine: LocalEngine) -> None:
        self._dispatch(ev.EngineGone(engine, engine_lost()))

    async def reads_done(self, engine: LocalEngine) -> None:
        await until(lambda: not self._table.num_reads(engine))

    def _copy_here(self, chunk: Chunk) -> int | None:
        if len(chunk.plans) != 1 or chunk.tail or chunk.one_in:
            return None
        return MappedWork(chunk=chunk, plan=chunk.plans[0]).copy_here(SHORT_BYTES)

    def _transfers_of(self, chunk: Chunk, choice: PathChoice) -> Iterator[ev.Transfer]:
        if choice.path in (Path.STAGED, Path.PACKED):
            yield from self._tile_transfers(chunk, choice)
            return
        kind = DirectWork if choice.path is Path.DIRECT else MappedWork
        for plan in chunk.plans:
            work = kind(chunk=chunk, plan=plan)
            yield ev.Transfer(stages=work.stages, work=work, source=plan.source)

    def _tile_transfers(self, chunk: Chunk, choice: PathChoice) -> Iterator[ev.Transfer]:
        queues, tile_bytes = deque[Iterator[ev.Transfer]](), choice.tile_bytes
        for plan in chunk.plans:
            if choice.path is Path.PACKED:
                transfers_of = self._transfers_of_share
                queues += (transfers_of(chunk, plan.source, one, tile_bytes) for one in plan.joined)
            else:
                indices = range(len(plan.staged))
                queues += (
                    self._staged_transfers(chunk, plan, index, tile_bytes) for index in indices
                )
        while queues:  # sources and ranks take turns
            queue = queues.popleft()
            if (transfer := next(queue, None)) is not None:
                yield transfer
                queues.append(queue)

    def _staged_transfers(
        self, chunk: Chunk, plan: SourcePlan, index: int, tile_bytes: int
    ) -> Iterator[ev.Transfer]:
        slots, staged = self._agent.staging.at(HOST), plan.staged[index]
        for tile in staged.tiles(chunk.spans[staged.group], tile_bytes=tile_bytes):
            work = StagedWork(chunk=chunk, plan=plan, index=index, tile=tile, slots=slots)
            yield ev.Transfer(stages=work.stages, work=work, source=plan.source, device=HOST)

    # Ranks of one device that read the same bytes share a transfer.
    def _transfers_of_share(
        self, chunk: Chunk, source: Source, share: Share, tile_bytes: int
    ) -> Iterator[ev.Transfer]:
        group = chunk.route.readers[share.reader].engine.group(share.group)
        device, span = chunk.route.engine.ranks[share.reader].device, chunk.spans[share.group]
        slots = self._agent.staging.at(device)
        for tile in cut_into_tiles(share, group, span, tile_bytes=tile_bytes):
            work = PackedWork(
                chunk=chunk, source=source, share=share, group=group, tile=tile, slots=slots
            )
            yield ev.Transfer(stages=work.stages, work=work, source=source, device=device)

    def _zero_transfers(self, chunk: Chunk) -> Iterator[ev.Transfer]:
        for name, span in chunk.tail.items():
            for rank in chunk.route.engine.ranks.values():
                if name in rank.num_blocks:
                    work = ZeroWork(chunk=chunk, rank=rank, group=name, span=span)
                    yield ev.Transfer(stages=work.stages, work=work)

    def _compare_transfers(self, chunk: Chunk, path: Path) -> Iterator[ev.Transfer]:
        for plan in chunk.plans if chunk.one_in else ():
            for share in plan.joined if path is Path.PACKED else plan.shares:
                for tile in cut_for_digests(share, chunk.spans[share.group]):
                    work = CompareWork(chunk=chunk, source=plan.source, share=share, tile=tile)
                    yield ev.Transfer(stages=work.stages, work=work, source=plan.source)

    def _replace_data_process(self, _: ev.ReplaceDataProcess) -> None:
        reason = f"what was aborted has not ended within {self._table.limits.quarantine_s:g} s"
        log.warning("data.replaced", reason=reason)
        replace = partial(self._agent.data.replace, reason, grace_s=GRACE_S)
        self._agent.tasks.start_soon(replace)


# The home grants tokens when its own ranks have computed them. Others may be late:
#
#     home's rank     step 7 ─▶ offer, after 7 ─▶ grant, after 7
#     other rank      ─────── step 7 ────────────────────┼──▶ 7 is reached
#     fetch                                              └ await_work ─────┴▶ READ
def _order_transfers(chunk: Chunk) -> Iterator[ev.Transfer]:
    for plan in chunk.plans:
        if plan.source in chunk.route.remote_sources:
            work = OrderWork(chunk=chunk, source=plan.source)
            yield ev.Transfer(stages=work.stages, work=work, source=plan.source)


def _stage_failed(command: ev.Begin, error: Exception) -> ev.StageEnded:
    return ev.StageEnded(command.transfer, error=failure(error))
