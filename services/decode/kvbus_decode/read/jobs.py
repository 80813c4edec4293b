"""What the legs of a chunk carry: how each of them is carried out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvbus.agent.engines.rank_memory import RankMemory
from kvbus.agent.staging.slot_memory import SlotMemory
from kvbus.agent.staging.turns import Job, Work
from kvbus.errors import ErrorCode, GeometryError, LocalError, RemoteError
from kvbus.geometry import BlockTable, Box, GroupSpec, SlotOrder, slot_bytes
from kvbus.memory.run_copy import copy_few_runs, copy_runs
from kvbus.planning import (
    Copies,
    Descriptors,
    Run,
    Share,
    check_runs,
    check_sources,
    cut_copies,
    from_slot,
    whole_slot,
)
from kvbus.protocol.staging import Packed
from kvbus.transport import MemoryKind, Read
from kvbus_decode.peer.route import Source, SourcePlan
from kvbus_decode.read.chunk import Chunk

if TYPE_CHECKING:
    from kvbus.memory.paged import PagedMemory

Rows = tuple[Descriptors, MemoryKind, MemoryKind]
"""READs, and the kinds of memory: ours and theirs."""

SHORT_BYTES = 128 << 10
SHORT_RUNS = 32
"""Copies up to these are made on the event loop, in 30 to 130 µs with their plan; the way to a
thread and back takes 70.
"""


@dataclass(slots=True, eq=False)
class DirectJob:
    """All that is read from one source, straight into the blocks."""

    chunk: Chunk
    plan: SourcePlan
    transfer: Read | None = None
    aborted: bool = False

    @property
    def source(self) -> Source:
        """Who is read."""
        return self.plan.source

    @property
    def num_descriptors(self) -> int:
        """About how many READs it takes."""
        return self.plan.direct.num_descriptors(self.chunk.spans) if self.plan.direct else 0

    def rows(self, _slot: int | None) -> Rows:
        """The READs; raises `GeometryError`, and `LocalError` where NIXL knows one side not."""
        if self.plan.direct is None:
            raise LocalError("the memory of one side is not registered", code=ErrorCode.CONFIG)
        try:
            chunk = self.chunk
            rows = self.plan.direct.descriptors(chunk.source, chunk.target, chunk.spans)
        except (IndexError, KeyError) as error:
            raise _lacking(error) from error
        return rows, "DRAM", "DRAM"


# The memory that is copied from may end at any moment; the bytes under its addresses are zeros then
# (`kvbus_decode.peer.mapped_memory`). A fetch must not be completed with them:
#
#     the engine dies   its offers end in its agent, and then that hangs up: who has read a zero
#                       confirms or takes later, and is refused
#     its agent dies    nobody is left who could confirm
#     the file is cut   by an engine that lives: its lease goes on, and a confirm would say yes;
#                       but the map is closed before the first zero is there
#
#     copy   ──read──read──[closed]──zero──zero──┐ last job has ended
#                                                └─ is the map open? no: the leg has failed
#
# So a leg asks after its last job: a map that is open then was so at each of its reads. It asks in
# all three cases, and needs the first two for nothing.
@dataclass(slots=True, eq=False)
class MappedJob:
    """All that is copied from one source whose memory is mapped here, straight into the blocks.

    Others wait for ``job_bytes`` at most, and so much is copied in vain after a stop.
    """

    chunk: Chunk
    plan: SourcePlan
    job_bytes: int
    copying: Work | None = None
    copied_bytes: list[int] = field(default_factory=list)
    """Of each job that was done."""

    @property
    def num_bytes(self) -> int:
        """Bytes that were copied."""
        return sum(self.copied_bytes)

    @property
    def is_short(self) -> bool:
        """Whether all of it takes no longer than its way to a thread would."""
        chunk, mapped = self.chunk, self.plan.mapped
        if chunk.route.num_bytes(chunk.spans) > SHORT_BYTES:
            return False
        return mapped is not None and mapped.num_descriptors(chunk.spans) <= SHORT_RUNS

    def jobs(self) -> list[Job]:
        """The copies, cut so that others get their turn; raises `GeometryError`."""
        mapped, memory, chunk = self.plan.mapped, self.plan.source.mapped, self.chunk
        if mapped is None or memory is None:
            raise LocalError("the memory of one side is not mapped", code=ErrorCode.INTERNAL)
        tables = chunk.source, chunk.target
        try:
            runs = mapped.few_runs(*tables, chunk.spans) if self.is_short else None
            copies = mapped.copies(*tables, chunk.spans) if runs is None else ()
        except (IndexError, KeyError) as error:
            raise _lacking(error) from error
        if runs is not None:
            check_runs(runs, memory.extents)
            return [partial(self._copy_few, runs)]
        check_sources(copies, memory.extents)
        return [partial(self._copy, job) for job in cut_copies(copies, job_bytes=self.job_bytes)]

    def loss(self) -> RemoteError | None:
        """Why nothing counts that was copied, if the memory that it came from is gone."""
        memory = self.plan.source.mapped
        if memory is None or memory.is_open:
            return None
        message = f"the memory that was copied from is gone: {memory.closed}"
        return RemoteError(message, code=ErrorCode.TRANSFER_FAILED)

    def _copy(self, copies: Sequence[Copies]) -> None:
        if self.loss() is None:
            copy_runs(copies)
            self.copied_bytes.append(sum(one.num_bytes for one in copies))

    def _copy_few(self, runs: Sequence[Run]) -> None:
        if self.loss() is None:
            copy_few_runs(runs)
            self.copied_bytes.append(sum(num_bytes for _, _, num_bytes in runs))


@dataclass(slots=True, eq=False)
class BoxJob:
    """One box, from a rank of a source into ours; ``packed`` is where it lies there.

    ``slots`` are those of ours that it is scattered from. Without, ``reads`` are the READs from a
    slot at address 0 into the blocks.
    """

    chunk: Chunk
    source: Source
    share: Share
    group: GroupSpec
    box: Box
    order: SlotOrder
    slots: SlotMemory | None
    packed: Packed | None = None
    reads: Descriptors | None = None
    transfer: Read | None = None
    copying: Work | None = None
    aborted: bool = False

    @property
    def ranks(self) -> tuple[RankMemory, ...]:
        """The ranks of ours that it is for: with slots of ours, all of a joined share."""
        return tuple(self.chunk.route.engine.ranks[number] for number in self.share.readers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the box in a slot."""
        return slot_bytes(self.group, self.box, self.order)

    def blocks(self) -> BlockTable:
        """The prefill engine's blocks that hold the box."""
        return self.chunk.blocks_of(self.box)

    def block_reads(self) -> Descriptors:
        """READs from a slot at address 0 into the blocks; the caller's to change."""
        reads = self.chunk.route.slot_reads[self.share.reader]
        return reads.descriptors(self.box, self.order, table=self.chunk.target[self.box.group])

    def rows(self, slot: int | None) -> Rows:
        """The READ into number ``slot`` of ours, or those into the blocks."""
        packed, slots = self.packed, self.slots
        if packed is not None and slots is not None and slot is not None:
            ours = slots.address(slot), slots.device
            rows = whole_slot(ours, (packed.address, packed.device), packed.num_bytes)
            return rows, slots.memory, packed.memory
        if packed is None or self.reads is None:
            raise LocalError("the box is not packed", code=ErrorCode.INTERNAL)
        return from_slot(self.reads, packed.address, packed.device), "DRAM", packed.memory

    def copy(self, slot: int | None, memory: "PagedMemory") -> None:
        """Scatter number ``slot`` of ours into the blocks of one rank; in a thread."""
        from kvbus.memory import copying  # noqa: PLC0415  # imports torch: seconds

        if self.slots is None or slot is None:
            raise LocalError("the box has no slot", code=ErrorCode.INTERNAL)
        table = self.chunk.target[self.box.group]
        packed = copying.Slot(self.slots.tensor(slot), self.order)
        copying.scatter(memory, table, self.box, packed)


@dataclass(slots=True, eq=False)
class ZeroJob:
    """Positions of one group that are zeroed on one rank."""

    chunk: Chunk
    ranks: tuple[RankMemory]
    group: GroupSpec
    span: tuple[int, int]
    copying: Work | None = None

    def copy(self, _slot: int | None, memory: "PagedMemory") -> None:
        """Zero them; in a thread."""
        from kvbus.memory import copying  # noqa: PLC0415  # imports torch: seconds

        copying.zero_positions(memory, self.chunk.target[self.group.name], *self.span)


def _lacking(error: Exception) -> GeometryError:
    return GeometryError(f"the offer's block tables do not hold its tokens: {error}")
