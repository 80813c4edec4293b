"""From a chunk and its path to legs, and what each leg needs to be carried out."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvbus.agent.engines.rank_memory import RankMemory
from kvbus.errors import ErrorCode, GeometryError, LocalError
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
from kvbus.protocol.staging import Packed
from kvbus.transport import Read
from kvbus_decode.peer.route import Source, SourcePlan
from kvbus_decode.read.chunk import Chunk
from kvbus_decode.read.leg import Leg, Stage

Stages = tuple[Stage, ...]

DIRECT: Stages = (Stage.READ,)
REORDERED: Stages = (Stage.PACK, Stage.READ)
PACKED: Stages = (Stage.PACK, Stage.READ, Stage.COPY)
ZEROING: Stages = (Stage.COPY,)


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

    def descriptors(self) -> Descriptors:
        """The READs; raises `GeometryError`, and `LocalError` where NIXL knows one side not."""
        if self.plan.direct is None:
            raise LocalError("the memory of one side is not registered", code=ErrorCode.CONFIG)
        try:
            chunk = self.chunk
            return self.plan.direct.descriptors(chunk.source, chunk.target, chunk.spans)
        except (IndexError, KeyError) as error:
            message = f"the offer's block tables do not hold its tokens: {error}"
            raise GeometryError(message) from error


@dataclass(slots=True, eq=False)
class BoxJob:
    """One box, from a rank of a source into one of ours; ``packed`` is where it lies there.

    ``reads`` are the READs from a slot at address 0 into the blocks, if it is not scattered.
    """

    chunk: Chunk
    source: Source
    share: Share
    group: GroupSpec
    box: Box
    order: SlotOrder
    packed: Packed | None = None
    reads: Descriptors | None = None
    transfer: Read | None = None
    aborted: bool = False

    @property
    def rank(self) -> RankMemory:
        """The rank of ours that it is for."""
        return self.chunk.route.engine.ranks[self.share.reader]

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


@dataclass(slots=True, eq=False)
class ZeroJob:
    """Positions of one group that are zeroed on one rank."""

    chunk: Chunk
    rank: RankMemory
    group: GroupSpec
    span: tuple[int, int]


def direct_legs(chunk: Chunk) -> list[Leg]:
    """One leg for each source."""
    return [
        Leg(DIRECT, DirectJob(chunk, plan), plan.source)
        for plan in chunk.route.plans(chunk.replica_index)
    ]


def box_legs(chunk: Chunk, path: Path, *, box_bytes: int) -> list[Leg]:
    """One leg for each box; those of different sources and ranks take turns.

    Raises `GeometryError` when ``box_bytes`` is too small for any.
    """
    queues = [
        deque(_legs_of_share(chunk, plan, share, path, box_bytes))
        for plan in chunk.route.plans(chunk.replica_index)
        for share in plan.shares
    ]
    legs: list[Leg] = []
    while queues:
        legs += [queue.popleft() for queue in queues if queue]
        queues = [queue for queue in queues if queue]
    return legs


def zero_legs(chunk: Chunk) -> list[Leg]:
    """One leg for each rank that holds a group with a tail."""
    engine = chunk.route.engine
    return [
        Leg(ZEROING, ZeroJob(chunk, rank, engine.spec.group(name), span))
        for name, span in chunk.tail.items()
        for rank in engine.ordered_ranks()
        if name in rank.num_blocks
    ]


def _legs_of_share(
    chunk: Chunk, plan: SourcePlan, share: Share, path: Path, box_bytes: int
) -> Iterator[Leg]:
    reader = chunk.route.readers[share.reader]
    group = reader.engine.group(share.group)
    order = canonical_order()
    if path is Path.REORDERED:
        order = reader_order(reader.rank.regions, group) or order
    stages = REORDERED if path is Path.REORDERED else PACKED
    device = chunk.route.engine.ranks[share.reader].device
    span = chunk.spans[share.group]
    for box in cut_into_boxes(share, group, span, order=order, box_bytes=box_bytes):
        work = BoxJob(chunk, plan.source, share, group, box, order)
        yield Leg(stages, work, plan.source, device)
