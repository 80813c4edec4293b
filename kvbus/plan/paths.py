"""What one handoff is on each path: READs, boxes and bytes; and which one the rule chooses."""

from dataclasses import dataclass
from math import ceil

import msgspec

from kvbus.geometry import SlotOrder, canonical_order
from kvbus.plan.synthetic_engine import SyntheticEngine
from kvbus.planning import RunPlan, Share, Spans
from kvbus.planning.boxes import cut_into_boxes, reader_order
from kvbus.planning.fetch_shape import (
    FetchShape,
    Path,
    PathWork,
    choose_path,
    usual_box_bytes,
)
from kvbus.planning.fetch_work import FetchWork

MAX_MADE = 1 << 22
"""READs that are made one by one; more are only counted, before neighbours merge."""
MAX_CUT = 1 << 17
"""Boxes that are cut; more are only counted."""


@dataclass(frozen=True, slots=True)
class PlannedHandoff:
    """Who reads which positions from whom; the packed path by ``joined`` shares."""

    holder: SyntheticEngine
    reader: SyntheticEngine
    shares: tuple[Share, ...]
    joined: tuple[Share, ...]
    spans: Spans


class PathPlan(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "num_descriptors": "descriptors",
        "num_copied_runs": "copied_runs",
        "num_bytes": "bytes",
        "num_boxes": "boxes",
    },
):
    """One path, as ``--json`` has it: READs are ``num_descriptors`` of ``num_bytes`` in all.

    The mapped path has no READs: it copies ``num_copied_runs`` in their place. ``over_read_bytes``
    are read beyond what the decode engine needs. ``slot_bytes`` pass through staging slots, which
    have room for whole blocks where only a part is read. ``scattered_bytes`` are written out of
    slots: more than are read, where several ranks hold the same.
    """

    num_bytes: int
    num_descriptors: int
    num_copied_runs: int
    over_read_bytes: int
    slot_bytes: int
    scattered_bytes: int
    num_boxes: int
    box_bytes: int | None

    @property
    def mean_bytes(self) -> float:
        """Bytes of a READ or of a copied run, on average; 0 when there is none."""
        num = self.num_descriptors + self.num_copied_runs
        return self.num_bytes / num if num else 0.0


def plan_paths(
    handoff: PlannedHandoff, *, slot_bytes: int, same_machine: bool
) -> tuple[dict[Path, PathPlan], Path, int]:
    """Every path that the handoff can take, through slots of ``slot_bytes``; the one that the rule
    chooses, and how many bytes several ranks read alike.

    On the ``same_machine`` the decode agent has mapped the prefill engine's memory.
    """
    work = FetchWork(handoff.holder.ranks, handoff.reader.ranks, handoff.shares, handoff.joined)
    counted = work.shape(handoff.spans, slot_bytes=slot_bytes, mapped=same_machine)
    shape = _with_merged_reads(handoff, counted)
    direct = counted[Path.DIRECT]
    needed, repeated_bytes = direct.num_bytes, work.repeated_bytes(handoff.spans)
    chosen = choose_path(
        counted,
        num_bytes=needed,
        num_runs=direct.num_runs,
        repeated_bytes=repeated_bytes,
    )
    usual = usual_box_bytes(needed, slot_bytes=slot_bytes)
    plans: dict[Path, PathPlan] = {}
    for path, found in shape.items():
        in_boxes = path in (Path.PACKED, Path.REORDERED)
        num_boxes, box_bytes = 0, None
        if in_boxes:
            box_bytes = min(slot_bytes, max(usual, work.least_box_bytes(path)))
            num_boxes = found.num_shares * ceil(found.num_bytes / found.num_shares / box_bytes)
            if num_boxes <= MAX_CUT:
                num_boxes = _num_boxes(handoff, path, box_bytes)
        plans[path] = PathPlan(
            num_bytes=needed if path is Path.REORDERED else found.num_bytes,
            num_descriptors={Path.PACKED: num_boxes, Path.MAPPED: 0}.get(path, found.num_runs),
            num_copied_runs=found.num_runs if path is Path.MAPPED else 0,
            over_read_bytes=0 if in_boxes else found.num_bytes - needed,
            slot_bytes=found.num_bytes if in_boxes else 0,
            scattered_bytes=needed if path is Path.PACKED else 0,
            num_boxes=num_boxes,
            box_bytes=box_bytes,
        )
    return plans, chosen, repeated_bytes


def _with_merged_reads(handoff: PlannedHandoff, shape: FetchShape) -> FetchShape:
    """The shape with direct READs and copied runs counted after neighbours have merged."""
    if Path.DIRECT not in shape or shape[Path.DIRECT].num_runs > MAX_MADE:
        return shape
    num_descriptors = num_bytes = 0
    for number in handoff.reader.ranks:
        own = [share for share in handoff.shares if share.reader == number]
        plan = RunPlan(handoff.holder.ranks, handoff.reader.ranks, own)
        made = plan.runs(handoff.holder.tables, handoff.reader.tables, handoff.spans)
        num_descriptors += len(made.reads().local)
        num_bytes += made.num_bytes
    merged = PathWork(num_bytes=num_bytes, num_runs=num_descriptors)
    return {
        path: merged if path in (Path.DIRECT, Path.MAPPED) else work for path, work in shape.items()
    }


def _num_boxes(handoff: PlannedHandoff, path: Path, box_bytes: int) -> int:
    """How many boxes the shares are cut into."""
    num_boxes = 0
    for share in handoff.joined if path is Path.PACKED else handoff.shares:
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
