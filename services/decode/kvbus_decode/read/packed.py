"""The packed path: boxes are gathered by the prefill agent, read, and scattered, in a pipeline.

Refuses more boxes of a piece at a time than the configuration says; a slot of ours is given back
only when nothing can write into it any more.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbus.agent.process.guard import guarded
from kvbus.agent.process.service import Agent
from kvbus.agent.staging.copiers import Copiers
from kvbus.agent.staging.slot_memory import SlotMemory
from kvbus.errors import ErrorCode, GeometryError, KVBusError, RemoteError
from kvbus.geometry import (
    BlockTable,
    Box,
    GroupSpec,
    SlotOrder,
    canonical_order,
    num_blocks_for,
    slot_bytes,
)
from kvbus.planning import Descriptors, Path, Share, cut_into_boxes, reader_order
from kvbus.protocol.staging import Pack, Packed, Unpack
from kvbus.transport import MemoryKind, ReadOutcome
from kvbus_decode.config import DecodeConfig
from kvbus_decode.peer.route import Source, SourcePlan
from kvbus_decode.read.direct import read_error
from kvbus_decode.read.piece import Piece, PieceRead
from kvbus_decode.read.slot_reads import from_slot, whole_slot
from kvbus_decode.read.slot_ring import SlotRing

if TYPE_CHECKING:
    from kvbus.memory.paged import PagedMemory

UNPACK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """One box on its way from a source into one of our ranks."""

    source: Source
    share: Share
    group: GroupSpec
    box: Box
    order: SlotOrder


@dataclass(slots=True)
class Jobs:
    """What is left of a piece; ``read`` are slots of each source that it may use again."""

    path: Path
    waiting: deque[Job]
    read: dict[Source, list[int]] = field(default_factory=dict)


class PackedReader:
    """Reads pieces box by box, through slots of both sides."""

    def __init__(self, agent: Agent, config: DecodeConfig, copiers: Copiers) -> None:
        self._agent, self._config, self._copiers = agent, config, copiers
        self._rings: dict[str, SlotRing] = {}

    @property
    def num_slots_in_use(self) -> int:
        """Slots of ours that boxes are read into, or scattered from."""
        return sum(ring.num_in_use for ring in self._rings.values())

    def start(self, read: PieceRead, jobs: Jobs) -> None:
        """Read a piece that `cut` made jobs of."""
        for _ in range(min(self._config.boxes_in_flight, len(jobs.waiting))):
            read.begin()
            self._agent.tasks.start_soon(self._work, read, jobs)

    def cut(self, piece: Piece, path: Path, *, box_bytes: int) -> Jobs:
        """The boxes of a piece; raises `GeometryError` when ``box_bytes`` is too small for any."""
        return Jobs(path, deque(_jobs(piece, path, box_bytes)))

    async def _work(self, read: PieceRead, jobs: Jobs) -> None:
        """Move one box after the other until none is left; the workers of a piece overlap."""

        async def move_all() -> None:
            while jobs.waiting and not read.stopped:
                await self._move(read, jobs, jobs.waiting.popleft())

        await guarded(move_all, read.fail)
        self._release_lease(
            jobs
        )  # no request of this worker follows, and others may wait for a slot
        read.end()

    async def _move(self, read: PieceRead, jobs: Jobs, job: Job) -> None:
        """Have a box packed, READ it, and scatter it when it went into a slot of ours.

        Ours is taken last: a peer that does not answer keeps none from the others.
        """
        sent_at = self._agent.loop.time()
        packing = self._pack(read, jobs, job)
        blocks = self._block_reads(read, jobs, job, packing)  # while the box is gathered
        packed = await read.unless_stopped(packing)
        with ExitStack() as taken:
            try:
                _check_size(packed, job)
                local: MemoryKind = "DRAM"
                content = None
                if blocks is not None:
                    rows = from_slot(blocks, packed)
                else:
                    staging, slot = await self._own_slot(read, job, taken)
                    rows, local = whole_slot(packed, staging, slot), staging.memory
                    content = staging.tensor(slot)
                kinds = local, packed.memory
                num_bytes = await self._read(read, job.source, rows, kinds)
            finally:
                jobs.read.setdefault(job.source, []).append(packed.slot_id)
            self._check_lease(packed, sent_at)
            if content is not None and not read.stopped:
                await self._scatter(read.piece, job, content)
        read.num_bytes += num_bytes

    def _block_reads(
        self, read: PieceRead, jobs: Jobs, job: Job, packing: "asyncio.Future[Packed]"
    ) -> Descriptors | None:
        """From a slot at address 0 into the engine's blocks; None for a box that is scattered."""
        if jobs.path is not Path.REORDERED:
            return None
        try:
            reads = read.piece.route.slot_reads[job.share.reader]
            return reads.descriptors(job.box, job.order, table=read.piece.target[job.box.group])
        except BaseException:
            packing.cancel()  # what it brings is given back
            raise

    async def _own_slot(
        self, read: PieceRead, job: Job, taken: ExitStack
    ) -> tuple[SlotMemory, int]:
        """A slot of ours beside the rank that the box is for, which ``taken`` gives back."""
        ring = self._slots(read.piece.route.engine.ranks[job.share.reader].place)
        slot = await read.unless_stopped(ring.take(job.source.peer))
        taken.callback(ring.give, slot)
        return ring.staging, slot

    def _check_lease(self, packed: Packed, sent_at: float) -> None:
        """What was read later may be of another box."""
        if self._agent.loop.time() > sent_at + packed.slot_lease_s:
            raise RemoteError(
                "the lease of a staging slot ended before it was read",
                code=ErrorCode.LEASE_EXPIRED,
                slot_lease_s=packed.slot_lease_s,
            )

    async def _scatter(self, piece: Piece, job: Job, content: Any) -> None:
        """From a slot of ours, a uint8 tensor, into the engine's blocks; in a thread."""
        engine = piece.route.engine

        def copy(memory: "PagedMemory") -> None:
            from kvbus.memory.copying import Slot, scatter  # noqa: PLC0415  # imports torch

            scatter(memory, piece.target[job.box.group], job.box, Slot(content, job.order))

        rank = engine.ranks[job.share.reader]
        await self._copiers.run(copy, engine=engine, memory=rank, group=job.group)

    def _slots(self, place: str) -> SlotRing:
        """The slots of a place; raises `LocalError` when it has none."""
        ring = self._rings.get(place)
        if ring is None:
            ring = self._rings[place] = SlotRing(self._agent.staging.at(place))
        return ring

    def _pack(self, read: PieceRead, jobs: Jobs, job: Job) -> "asyncio.Future[Packed]":
        """Ask for a box; a reply that comes when nobody waits any more is given back."""
        piece, source = read.piece, job.source
        future: asyncio.Future[Packed] = self._agent.loop.create_future()

        def on_reply(outcome: Packed | KVBusError) -> None:
            if isinstance(outcome, KVBusError):
                if not future.done():
                    future.set_exception(outcome)
            elif future.done():
                self._unpack(source, [outcome.slot_id])
            else:
                future.set_result(outcome)

        message = Pack(
            agent_boot=source.agent_boot,
            engine_id=piece.route.prefill.engine_id,
            memory_id=source.memory_id,
            offer_id=piece.offer_id,
            epoch=piece.epoch,
            rank=job.share.holder,
            box=job.box,
            order=job.order,
            table=_blocks_of(piece, job.box),
            slot_lease_s=self._config.lease_s,
            done=tuple(jobs.read.pop(source, ())),
        )
        timeout_s = max(1e-3, piece.deadline - self._agent.loop.time())
        client = source.peer.client
        client.send(message, timeout_s=timeout_s, on_reply=on_reply)
        return future

    async def _read(
        self,
        read: PieceRead,
        source: Source,
        rows: Descriptors,
        kinds: tuple[MemoryKind, MemoryKind],
    ) -> int:
        """Bytes that were read; returns only when nothing of the READ is in flight.

        ``kinds`` of memory are ours and theirs.
        """
        ended: asyncio.Future[ReadOutcome] = self._agent.loop.create_future()
        transfer = self._agent.transport.read(
            source.nixl_agent,
            rows.local,
            rows.remote,
            on_end=ended.set_result,
            local_memory=kinds[0],
            remote_memory=kinds[1],
        )
        forget = read.on_stop(transfer.abort)
        outcome = await ended
        forget()
        error = read_error(outcome)
        if error is not None:
            raise error
        return outcome.num_bytes

    def _release_lease(self, jobs: Jobs) -> None:
        for source, slot_ids in jobs.read.items():
            self._unpack(source, slot_ids)
        jobs.read = {}

    def _unpack(self, source: Source, slot_ids: list[int]) -> None:
        """Give slots back; when that fails they come back by themselves, with their lease."""
        message = Unpack(agent_boot=source.agent_boot, slot_ids=tuple(slot_ids))
        try:
            source.peer.client.send(message, timeout_s=UNPACK_TIMEOUT_S, on_reply=lambda _: None)
        except KVBusError:
            return


def _jobs(piece: Piece, path: Path, box_bytes: int) -> Iterator[Job]:
    """All boxes of a piece; those of different sources and ranks take turns."""
    queues = [
        deque(_jobs_of_share(piece, plan, share, path, box_bytes))
        for plan in piece.route.plans(piece.spread)
        for share in plan.shares
    ]
    while queues:
        for queue in queues:
            if queue:
                yield queue.popleft()
        queues = [queue for queue in queues if queue]


def _jobs_of_share(
    piece: Piece, plan: SourcePlan, share: Share, path: Path, box_bytes: int
) -> Iterator[Job]:
    reader = piece.route.readers[share.reader]
    group = reader.engine.group(share.group)
    order = canonical_order()
    if path is Path.REORDERED:
        order = reader_order(reader.rank.regions, group) or order
    span = piece.spans[share.group]
    for box in cut_into_boxes(share, group, span, order=order, box_bytes=box_bytes):
        yield Job(plan.source, share, group, box, order)


def _blocks_of(piece: Piece, box: Box) -> BlockTable:
    """The prefill engine's blocks that hold a box."""
    table = piece.source[box.group]
    size = piece.route.prefill.group(box.group).block_size
    first, end = box.start // size, num_blocks_for(box.stop, size)
    at = first - table.first_block
    return BlockTable(ids=table.ids[4 * at : 4 * (at + end - first)], first_block=first)


def _check_size(packed: Packed, job: Job) -> None:
    wanted = slot_bytes(job.group, job.box, job.order)
    if packed.num_bytes != wanted:
        raise GeometryError(
            f"the prefill agent packed {packed.num_bytes} bytes, the box has {wanted}"
        )
