"""What the legs of a chunk carry: how each of them is carried out."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbus.agent.engines.rank_memory import RankMemory
from kvbus.agent.staging.slot_memory import SlotMemory
from kvbus.agent.staging.turns import Work
from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import BlockTable, Box, GroupSpec, SlotOrder, num_blocks_for, slot_bytes
from kvbus.planning import Descriptors, Share, from_slot, whole_slot
from kvbus.protocol.staging import Packed
from kvbus.transport import MemoryKind, Read
from kvbus_decode.peer.route import Source, SourcePlan
from kvbus_decode.read.chunk import Chunk

if TYPE_CHECKING:
    from kvbus.memory.paged import PagedMemory

Rows = tuple[Descriptors, MemoryKind, MemoryKind]
"""READs, and the kinds of memory: ours and theirs."""


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
            message = f"the offer's block tables do not hold its tokens: {error}"
            raise GeometryError(message) from error
        return rows, "DRAM", "DRAM"


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
        table = self.chunk.source[self.box.group]
        size = self.chunk.route.prefill.group(self.box.group).block_size
        first, end = self.box.start // size, num_blocks_for(self.box.stop, size)
        at = first - table.first_block
        return BlockTable(ids=table.ids[4 * at : 4 * (at + end - first)], first_block=first)

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
