"""The legs of a chunk on each path, and what each of them carries: how it is carried out."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from kvbus.agent.copiers import Job, Work
from kvbus.agent.segments import RankMemory
from kvbus.agent.slots import SlotMemory, StagingDevices
from kvbus.errors import ErrorCode, GeometryError, LocalError, RemoteError
from kvbus.geometry import Box, GroupSpec, slot_bytes
from kvbus.memory import copying
from kvbus.memory.run_copy import copy_runs
from kvbus.planning import Path, Reads, Runs, Share, cut_for_digests, cut_into_boxes
from kvbus.protocol.peer import Packed
from kvbus.transport import MemoryKind, Read
from kvbus_decode.chunk import Chunk
from kvbus_decode.compare import CompareJob
from kvbus_decode.paths import PathChoice
from kvbus_decode.read_table import COMPARING, COPYING, PACKING, READING, Leg
from kvbus_decode.route import SourcePlan

Rows = tuple[Reads, MemoryKind, MemoryKind]
"""READs, and the kinds of memory: ours and theirs."""

SHORT_BYTES = 128 << 10
"""So many, in few runs, are copied on the event loop, in 30 to 130 µs with their plan; the way to a
thread and back takes 70.
"""

PACKED = PACKING, READING, COPYING


@dataclass(slots=True, eq=False, kw_only=True)
class LegJob:
    """What a leg is at: a READ, or a copy in threads."""

    transfer: Read | None = None
    copying: Work | None = None
    aborted: bool = False

    def abort(self) -> None:
        """Begin no further part: NIXL cannot take back what was posted, nor a thread a job."""
        self.aborted = True
        if self.transfer is not None:
            self.transfer.abort()
        if self.copying is not None:
            self.copying.stop(LocalError("the copy was aborted", code=ErrorCode.CANCELLED))


@dataclass(slots=True, eq=False)
class DirectJob(LegJob):
    """All that is read from one source, straight into the blocks."""

    chunk: Chunk
    plan: SourcePlan

    @property
    def num_descriptors(self) -> int:
        """About how many READs it takes."""
        return self.plan.direct.num_runs(self.chunk.spans) if self.plan.direct else 0

    def rows(self, _slot: int | None) -> Rows:
        """The READs; raises `GeometryError`, and `LocalError` where NIXL knows one side not."""
        if self.plan.direct is None:
            raise LocalError("the memory of one side is not registered", code=ErrorCode.CONFIG)
        try:
            chunk = self.chunk
            tables = chunk.wanted.tables, chunk.asked.tables
            runs = self.plan.direct.runs(*tables, chunk.spans)
        except (IndexError, KeyError) as error:
            raise _lacking(error) from error
        return runs.reads(), "DRAM", "DRAM"


# The memory that is copied from may end at any moment; the bytes under its addresses are zeros then
# (`kvbus_decode.mapped`). A fetch must not be completed with them:
#
#     the engine dies   its offers end in its agent, and then that hangs up: a fetch that has read
#                       a zero takes later, and is refused
#     its agent dies    no one is left to say yes
#     the file is cut   by an engine that lives: its lease goes on, and a take would get a yes;
#                       but the map is closed before the first zero is there
#
#     copy   ──read──read──[closed]──zero──zero──┐ last job has ended
#                                                └─ is the map open? no: the leg has failed
#
# So a leg asks after its last job: a map that is open then was so at each of its reads. It asks in
# all three cases, and needs the first two for nothing.
@dataclass(slots=True, eq=False)
class MappedJob(LegJob):
    """All that is copied from one source whose memory is mapped here, straight into the blocks.

    Other copies wait for ``job_bytes`` at most; so much is still copied after a stop.
    """

    chunk: Chunk
    plan: SourcePlan
    job_bytes: int
    copied_bytes: list[int] = field(default_factory=list)
    """Of each job that was done."""

    @property
    def num_bytes(self) -> int:
        """Bytes that were copied."""
        return sum(self.copied_bytes)

    def jobs(self) -> list[Job]:
        """The copies, cut so that others get their turn; raises `GeometryError`."""
        return [partial(self.copy, job) for job in self.runs().cut(self.job_bytes)]

    def runs(self) -> Runs:
        """All bytes to copy; raises `GeometryError`."""
        mapped, memory, chunk = self.plan.mapped, self.plan.source.mapped, self.chunk
        if mapped is None or memory is None:
            raise LocalError("the memory of one side is not mapped", code=ErrorCode.INTERNAL)
        tables = chunk.wanted.tables, chunk.asked.tables
        try:
            runs = mapped.runs(*tables, chunk.spans)
        except (IndexError, KeyError) as error:
            raise _lacking(error) from error
        runs.check_sources(memory.extents)
        return runs

    def loss(self) -> RemoteError | None:
        """The error if the source memory was closed during the copy."""
        memory = self.plan.source.mapped
        if memory is None or not memory.closed:
            return None
        message = f"the memory that was copied from is gone: {memory.closed}"
        return RemoteError(message, code=ErrorCode.TRANSFER_FAILED)

    def copy(self, runs: Runs) -> None:
        """One of the `jobs`."""
        if self.loss() is None:
            copy_runs(runs)
            self.copied_bytes.append(runs.num_bytes)


@dataclass(slots=True, eq=False)
class BoxJob(LegJob):
    """One box, from a rank of a source into ours; ``packed`` is where it lies there.

    ``slots`` are those here that it is scattered from.
    """

    chunk: Chunk
    share: Share
    group: GroupSpec
    box: Box
    slots: SlotMemory
    packed: Packed | None = None

    @property
    def ranks(self) -> tuple[RankMemory, ...]:
        """The ranks here that it is for: all of a joined share."""
        return tuple(self.chunk.route.engine.ranks[number] for number in self.share.readers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the box in a slot."""
        return slot_bytes(self.group, self.box)

    def rows(self, slot: int | None) -> Rows:
        """The READ into number ``slot`` here."""
        packed = self.packed
        if packed is None or slot is None:
            raise LocalError("the box is not packed", code=ErrorCode.INTERNAL)
        whole = Runs(few=((self.slots.address(slot), packed.address, packed.num_bytes),))
        rows = whole.reads(local_device=self.slots.device, remote_device=packed.device)
        return rows, self.slots.memory, packed.memory

    def copy(self, slot: int | None, memory: copying.PagedMemory) -> None:
        """Scatter number ``slot`` here into the blocks of one rank; in a thread."""
        if slot is None:
            raise LocalError("the box has no slot", code=ErrorCode.INTERNAL)
        table = self.chunk.asked.tables[self.box.group]
        copying.scatter(memory, table, self.box, self.slots.view(slot))


@dataclass(slots=True, eq=False)
class ZeroJob(LegJob):
    """Positions of one group that are zeroed on one rank."""

    chunk: Chunk
    ranks: tuple[RankMemory]
    group: GroupSpec
    span: tuple[int, int]

    def copy(self, _slot: int | None, memory: copying.PagedMemory) -> None:
        """Zero them; in a thread."""
        copying.zero_positions(memory, self.chunk.asked.tables[self.group.name], *self.span)


def _lacking(error: Exception) -> GeometryError:
    return GeometryError(f"the offer's block tables do not hold its tokens: {error}")


def rounds_of(
    chunk: Chunk, choice: PathChoice, *, job_bytes: int, staging: StagingDevices
) -> tuple[tuple[Leg, ...], ...]:
    """The legs that bring the bytes by the path that was chosen, that zero, and that compare.

    Mapped memory is copied in jobs of ``job_bytes``. Raises `GeometryError` when a box is too small
    for anything, and `LocalError` for a source that makes no digests, and as `StagingDevices.at`.
    """
    path = choice.path
    if path is Path.DIRECT:
        legs = [Leg((READING,), DirectJob(chunk, plan), plan.source) for plan in chunk.plans]
    elif path is Path.MAPPED:
        legs = [
            Leg((COPYING,), MappedJob(chunk, plan, job_bytes), plan.source) for plan in chunk.plans
        ]
    else:
        legs = _box_legs(chunk, box_bytes=choice.box_bytes, staging=staging)
    later = tuple(_zero_legs(chunk)), tuple(_compare_legs(chunk, path))
    return tuple(legs), *filter(None, later)


def short_copy(chunk: Chunk, *, job_bytes: int) -> tuple[MappedJob, Runs] | None:
    """The copy that is all of a chunk of mapped memory, where the way to a thread takes longer.

    Raises as `MappedJob.runs`.
    """
    plans = chunk.plans
    if len(plans) != 1 or chunk.tail or chunk.one_in or chunk.num_bytes > SHORT_BYTES:
        return None
    work = MappedJob(chunk, plans[0], job_bytes)
    runs = work.runs()
    return None if runs.lattices else (work, runs)


def _box_legs(chunk: Chunk, *, box_bytes: int, staging: StagingDevices) -> list[Leg]:
    """One leg for each box; those of different sources and ranks take turns.

    A packed box is for all ranks that want the same and have their slots on one device.
    """
    slots = {rank.device: staging.at(rank.device) for rank in chunk.route.engine.ranks.values()}
    queues = [
        deque(_legs_of_share(chunk, plan, share, box_bytes=box_bytes, slots=slots))
        for plan in chunk.plans
        for share in plan.joined
    ]
    legs: list[Leg] = []
    while queues:
        legs += [queue.popleft() for queue in queues if queue]
        queues = [queue for queue in queues if queue]
    return legs


def _zero_legs(chunk: Chunk) -> Iterator[Leg]:
    """One leg for each rank that holds a group with a tail."""
    engine = chunk.route.engine
    for name, span in chunk.tail.items():
        for rank in engine.ranks.values():
            if name in rank.num_blocks:
                yield Leg((COPYING,), ZeroJob(chunk, (rank,), engine.spec.group(name), span))


def _compare_legs(chunk: Chunk, path: Path) -> Iterator[Leg]:
    """Legs that compare each rank with where its bytes were read."""
    for plan in chunk.plans if chunk.one_in else ():
        for share in plan.joined if path is Path.PACKED else plan.shares:
            for box in cut_for_digests(share, chunk.spans[share.group]):
                yield Leg((COMPARING,), CompareJob(chunk, plan.source, share, box), plan.source)


def _legs_of_share(
    chunk: Chunk,
    plan: SourcePlan,
    share: Share,
    *,
    box_bytes: int,
    slots: Mapping[str, SlotMemory],
) -> Iterator[Leg]:
    reader = chunk.route.readers[share.reader]
    group = reader.engine.group(share.group)
    device = chunk.route.engine.ranks[share.reader].device
    span = chunk.spans[share.group]
    for box in cut_into_boxes(share, group, span, box_bytes=box_bytes):
        work = BoxJob(chunk, share, group, box, slots[device])
        yield Leg(PACKED, work, plan.source, device)
