"""What one handoff is on each path: READs, boxes, bytes, and predicted time."""

from dataclasses import dataclass

import msgspec

from kvbus.geometry import SlotOrder, canonical_order
from kvbus.plan.synthetic_engine import SyntheticEngine
from kvbus.planning import DirectPlan, Share, Spans
from kvbus.planning.boxes import cut_into_boxes, reader_order
from kvbus.planning.cost import Rates, choose
from kvbus.planning.fetch_shape import FetchShape, Path, PathWork
from kvbus.planning.fetch_work import FetchWork

MAX_MADE = 1 << 22
"""READs that are made one by one; more are only counted, before neighbours merge."""
MAX_CUT = 1 << 17
"""Boxes that are cut; more are only counted."""


@dataclass(frozen=True, slots=True)
class PlannedHandoff:
    """Who reads which positions from whom."""

    holder: SyntheticEngine
    reader: SyntheticEngine
    shares: tuple[Share, ...]
    spans: Spans


class PathPlan(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"num_descriptors": "descriptors", "num_bytes": "bytes", "num_boxes": "boxes"},
):
    """One path, as ``--json`` has it: READs are ``num_descriptors`` of ``num_bytes`` in all.

    ``over_read_bytes`` are read beyond what the decode engine needs. ``slot_bytes`` pass through
    staging slots, which have room for whole blocks where only a part is read.
    """

    seconds: float
    gather_s: float
    read_s: float
    scatter_s: float
    num_bytes: int
    num_descriptors: int
    over_read_bytes: int
    slot_bytes: int
    num_boxes: int
    box_bytes: int | None

    @property
    def mean_bytes(self) -> float:
        """Bytes of a READ, on average; 0 when there is none."""
        return self.num_bytes / self.num_descriptors if self.num_descriptors else 0.0


def plan_paths(
    handoff: PlannedHandoff, rates: Rates, *, slot_bytes: int
) -> tuple[dict[Path, PathPlan], Path]:
    """Every path that the handoff can take, through slots of ``slot_bytes``; and the fastest."""
    work = FetchWork(handoff.holder.ranks, handoff.reader.ranks, handoff.shares)
    counted = work.shape(handoff.spans, slot_bytes=slot_bytes)
    shape = _with_merged_reads(handoff, counted)
    needed = counted[Path.DIRECT].num_bytes if Path.DIRECT in counted else 0
    choice = choose(shape, rates, slot_bytes=slot_bytes)
    plans: dict[Path, PathPlan] = {}
    for one in choice.predictions:
        found, is_direct = shape[one.path], one.path is Path.DIRECT
        num_boxes, box_bytes = one.num_boxes, None
        if not is_direct:
            box_bytes = max(one.box_bytes or 1, work.least_box_bytes(one.path))
            if num_boxes <= MAX_CUT:
                num_boxes = _num_boxes(handoff, one.path, box_bytes)
        plans[one.path] = PathPlan(
            seconds=one.seconds,
            gather_s=one.stages.gather_s,
            read_s=one.stages.read_s,
            scatter_s=one.stages.scatter_s,
            num_bytes=found.num_bytes if is_direct else needed,
            num_descriptors=num_boxes if found.num_descriptors is None else found.num_descriptors,
            over_read_bytes=found.num_bytes - needed if is_direct else 0,
            slot_bytes=0 if is_direct else found.num_bytes,
            num_boxes=num_boxes,
            box_bytes=box_bytes,
        )
    return plans, choice.path


def _with_merged_reads(handoff: PlannedHandoff, shape: FetchShape) -> FetchShape:
    """The shape with the READs of the direct path counted after neighbours have merged."""
    if Path.DIRECT not in shape or (shape[Path.DIRECT].num_descriptors or 0) > MAX_MADE:
        return shape
    num_descriptors = num_bytes = 0
    for number in handoff.reader.ranks:
        own = [share for share in handoff.shares if share.reader == number]
        plan = DirectPlan(handoff.holder.ranks, handoff.reader.ranks, own)
        made = plan.descriptors(handoff.holder.tables, handoff.reader.tables, handoff.spans)
        num_descriptors += len(made.local)
        num_bytes += made.num_bytes
    direct = PathWork(num_bytes=num_bytes, num_descriptors=num_descriptors)
    return {**shape, Path.DIRECT: direct}


def _num_boxes(handoff: PlannedHandoff, path: Path, box_bytes: int) -> int:
    """How many boxes the shares are cut into."""
    num_boxes = 0
    for share in handoff.shares:
        reader = handoff.reader.ranks[share.reader]
        group = reader.engine.group(share.group)
        order: SlotOrder | None = canonical_order()
        if path is Path.REORDERED:
            order = reader_order(reader.rank.regions, group)
        if order is not None:
            span = handoff.spans[share.group]
            boxes = cut_into_boxes(share, group, span, order=order, box_bytes=box_bytes)
            num_boxes += len(boxes)
    return num_boxes
