"""A chunk, tokens of a fetch that are read together, and its legs: how each is carried out.

Refuses tables that leave the cache or are not exactly the blocks of the tokens, before any byte
moves.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.engines.rank_memory import RankMemory
from kvbus.agent.staging.devices import StagingDevices
from kvbus.agent.staging.slot_memory import SlotMemory
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
from kvbus.planning import (
    Descriptors,
    Path,
    Share,
    Spans,
    chunk_spans,
    cut_into_boxes,
    from_slot,
    reader_order,
    tail_spans,
    whole_slot,
    whole_spans,
)
from kvbus.protocol.staging import Packed
from kvbus.transport import MemoryKind, Read
from kvbus_decode.peer.route import Route, Source, SourcePlan
from kvbus_decode.read.leg import Leg, Stage

if TYPE_CHECKING:
    from kvbus.memory.paged import PagedMemory

Stages = tuple[Stage, ...]
Rows = tuple[Descriptors, MemoryKind, MemoryKind]
"""READs, and the kinds of memory: ours and theirs."""

DIRECT: Stages = (Stage.READ,)
REORDERED: Stages = (Stage.PACK, Stage.READ)
PACKED: Stages = (Stage.PACK, Stage.READ, Stage.COPY)
ZEROING: Stages = (Stage.COPY,)


def check_tables(
    engine: LocalEngine, tables: Mapping[str, BlockTable], first_token: int, num_tokens: int
) -> None:
    """Raise `GeometryError` unless ``tables`` are exactly the blocks that the tokens need."""
    groups = {group.name: group for group in engine.spec.groups}
    if tables.keys() != groups.keys():
        raise GeometryError(
            f"tables are of groups {sorted(tables)}, the engine has {sorted(groups)}"
        )
    for name, table in tables.items():
        table.check_ids(engine.num_blocks(name))
        start, stop = groups[name].positions(first_token, num_tokens)
        table.check_covers(start, stop, groups[name].block_size)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions by group, from the offer's blocks into the fetch's.

    ``replica_index`` chooses among ranks that hold the same. ``tail`` are positions behind the last
    token that are zeroed after the read. ``epoch`` and ``token`` are those of the
    lease, ``deadline`` a time of the event loop.
    """

    route: Route
    offer_id: str
    epoch: int
    token: str = field(repr=False)
    source: Mapping[str, BlockTable]
    target: Mapping[str, BlockTable]
    spans: Spans
    tail: Spans
    replica_index: int
    deadline: float


def make_chunk(
    route: Route,
    *,
    offer_id: str,
    epoch: int,
    token: str,
    source: Mapping[str, BlockTable],
    target: Mapping[str, BlockTable],
    whole: tuple[int, int],
    part: tuple[int, int],
    last: bool,
    zero_tail: bool,
    replica_index: int,
    deadline: float,
) -> Chunk:
    """Tokens [part) of a fetch of tokens [whole); with the ``last`` chunk comes the state, and the
    tail if it is zeroed. Raises `GeometryError` when the offer's tables do not hold them.
    """
    spans = chunk_spans(route.prefill.groups, whole, part, last=last)
    route.check_tables(source, spans)
    tail: Spans = {}
    if zero_tail and last:
        groups = route.engine.spec.groups
        tail = tail_spans(groups, whole_spans(groups, *whole))
    lease, tables, place = (offer_id, epoch, token), (source, target), (replica_index, deadline)
    return Chunk(route, *lease, *tables, spans, tail, *place)


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
    """One box, from a rank of a source into one of ours; ``packed`` is where it lies there.

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
        """Scatter number ``slot`` of ours into the blocks; in a thread."""
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
    rank: RankMemory
    group: GroupSpec
    span: tuple[int, int]

    def copy(self, _slot: int | None, memory: "PagedMemory") -> None:
        """Zero them; in a thread."""
        from kvbus.memory import copying  # noqa: PLC0415  # imports torch: seconds

        copying.zero_positions(memory, self.chunk.target[self.group.name], *self.span)


def direct_legs(chunk: Chunk) -> list[Leg]:
    """One leg for each source."""
    return [
        Leg(DIRECT, DirectJob(chunk, plan), plan.source)
        for plan in chunk.route.plans(chunk.replica_index)
    ]


def box_legs(chunk: Chunk, path: Path, *, box_bytes: int, staging: StagingDevices) -> list[Leg]:
    """One leg for each box; those of different sources and ranks take turns.

    Raises `GeometryError` when ``box_bytes`` is too small for any, and as `StagingDevices.at`.
    """
    slots = {
        rank.device: staging.at(rank.device)
        for rank in chunk.route.engine.ranks.values()
        if path is Path.PACKED
    }
    queues = [
        deque(_legs_of_share(chunk, plan, share, path, box_bytes=box_bytes, slots=slots))
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
    chunk: Chunk,
    plan: SourcePlan,
    share: Share,
    path: Path,
    *,
    box_bytes: int,
    slots: Mapping[str, SlotMemory],
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
        work = BoxJob(chunk, plan.source, share, group, box, order, slots.get(device))
        yield Leg(stages, work, plan.source, device)
