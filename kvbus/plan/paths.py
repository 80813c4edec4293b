"""What one handoff is on each path: READs, boxes, bytes, and predicted time.

Refuses to choose against the cost model: it only says which path that finds fastest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvbus.geometry import Box, GroupSpec, SlotOrder, canonical_order, slot_bytes
from kvbus.plan.pretended import PretendedEngine
from kvbus.planning import DirectPlan, Share, Spans
from kvbus.planning.boxes import cut_into_boxes, reader_order
from kvbus.planning.cost import Prediction, Rates, choose
from kvbus.planning.fetch_shape import FetchShape, Path, PathWork
from kvbus.planning.fetch_work import FetchWork

MAX_MADE = 1 << 22
"""READs that are made one by one; more are only counted, before neighbours merge."""
MAX_CUT = 1 << 17
"""Boxes that are cut; more are only counted."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """Who reads which positions from whom."""

    holder: PretendedEngine
    reader: PretendedEngine
    shares: tuple[Share, ...]
    spans: Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPlan:
    """One path: READs are ``num_descriptors`` of ``num_bytes`` in all.

    ``over_read_bytes`` are read beyond what the decode engine needs. ``slot_bytes`` pass through
    staging slots, which have room for whole blocks where only a part is read.
    """

    path: Path
    is_fastest: bool
    prediction: Prediction
    num_bytes: int
    num_descriptors: int
    over_read_bytes: int = 0
    num_boxes: int = 0
    box_bytes: int | None = None
    slot_bytes: int = 0

    @property
    def mean_bytes(self) -> float:
        """Bytes of a READ, on average; 0 when there is none."""
        return self.num_bytes / self.num_descriptors if self.num_descriptors else 0.0


def plan_paths(handoff: Handoff, rates: Rates, *, slot_bytes: int) -> tuple[PathPlan, ...]:
    """Every path that the handoff can take, through slots of ``slot_bytes``."""
    work = FetchWork(handoff.holder.ranks, handoff.reader.ranks, handoff.shares)
    shape = work.shape(handoff.spans, slot_bytes=slot_bytes)
    needed = shape[Path.DIRECT].num_bytes if Path.DIRECT in shape else 0
    shape = _as_made(handoff, shape)
    choice = choose(shape, rates, slot_bytes=slot_bytes)
    plans = []
    for prediction in choice.predictions:
        plan = PathPlan(
            path=prediction.path,
            is_fastest=prediction.path is choice.path,
            prediction=prediction,
            num_bytes=needed,
            num_descriptors=0,
        )
        least = work.least_box_bytes(plan.path)
        plans.append(_with_reads(handoff, plan, shape, least_box_bytes=least))
    return tuple(plans)


def _as_made(handoff: Handoff, shape: FetchShape) -> FetchShape:
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


def _with_reads(
    handoff: Handoff, plan: PathPlan, shape: FetchShape, *, least_box_bytes: int
) -> PathPlan:
    work = shape[plan.path]
    if plan.path is Path.DIRECT:
        return replace(
            plan,
            num_bytes=work.num_bytes,
            num_descriptors=work.num_descriptors or 0,
            over_read_bytes=work.num_bytes - plan.num_bytes,
        )
    box_bytes = max(plan.prediction.box_bytes or 1, least_box_bytes)
    num_boxes, in_slots = plan.prediction.num_boxes, plan.num_bytes
    if num_boxes <= MAX_CUT:
        sizes = [slot_bytes(*one) for one in _boxes(handoff, plan.path, box_bytes)]
        num_boxes, in_slots = len(sizes), sum(sizes)
    return replace(
        plan,
        num_descriptors=num_boxes if work.num_descriptors is None else work.num_descriptors,
        num_boxes=num_boxes,
        box_bytes=box_bytes,
        slot_bytes=in_slots,
    )


def _boxes(
    handoff: Handoff, path: Path, box_bytes: int
) -> Iterator[tuple[GroupSpec, Box, SlotOrder]]:
    for share in handoff.shares:
        group = handoff.reader.spec.group(share.group)
        order: SlotOrder | None = canonical_order()
        if path is Path.REORDERED:
            order = reader_order(handoff.reader.ranks[share.reader].rank.regions, group)
        if order is not None:
            span = handoff.spans[share.group]
            for box in cut_into_boxes(share, group, span, order=order, box_bytes=box_bytes):
                yield group, box, order
