"""The legs of a chunk on each path: which stages they go through, and in what order they come."""

from collections import deque
from collections.abc import Iterator, Mapping

from kvbus.agent.staging.devices import StagingDevices
from kvbus.agent.staging.slot_memory import SlotMemory
from kvbus.geometry import canonical_order
from kvbus.planning import Path, Share, cut_into_boxes, reader_order
from kvbus.planning.digests import cut_for_digests
from kvbus_decode.peer.route import SourcePlan
from kvbus_decode.read.chunk import Chunk
from kvbus_decode.read.compare import CompareJob
from kvbus_decode.read.jobs import BoxJob, DirectJob, MappedJob, ZeroJob
from kvbus_decode.read.leg import Leg, Stage

Stages = tuple[Stage, ...]

DIRECT: Stages = (Stage.READ,)
REORDERED: Stages = (Stage.PACK, Stage.READ)
PACKED: Stages = (Stage.PACK, Stage.READ, Stage.COPY)
MAPPED: Stages = (Stage.COPY,)
ZEROING: Stages = (Stage.COPY,)
COMPARING: Stages = (Stage.COMPARE,)


def direct_legs(chunk: Chunk) -> list[Leg]:
    """One leg for each source."""
    return [
        Leg(DIRECT, DirectJob(chunk, plan), plan.source)
        for plan in chunk.route.plans(chunk.replica_index)
    ]


def mapped_legs(chunk: Chunk, *, job_bytes: int) -> list[Leg]:
    """One leg for each source."""
    return [
        Leg(MAPPED, MappedJob(chunk, plan, job_bytes), plan.source)
        for plan in chunk.route.plans(chunk.replica_index)
    ]


def box_legs(chunk: Chunk, path: Path, *, box_bytes: int, staging: StagingDevices) -> list[Leg]:
    """One leg for each box; those of different sources and ranks take turns.

    A packed box is for all ranks that want the same and have their slots on one device.
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
        for share in (plan.joined if path is Path.PACKED else plan.shares)
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
        Leg(ZEROING, ZeroJob(chunk, (rank,), engine.spec.group(name), span))
        for name, span in chunk.tail.items()
        for rank in engine.ordered_ranks()
        if name in rank.num_blocks
    ]


def compare_legs(chunk: Chunk, path: Path) -> list[Leg]:
    """Legs that compare each rank with where its bytes were read; none where nothing is asked for.

    Raises `LocalError` (``incompatible``) for a source that makes no digests.
    """
    if not chunk.one_in:
        return []
    return [
        Leg(COMPARING, CompareJob(chunk, plan.source, share, box), plan.source)
        for plan in chunk.route.plans(chunk.replica_index)
        for share in (plan.joined if path is Path.PACKED else plan.shares)
        for box in cut_for_digests(share, chunk.spans[share.group])
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
