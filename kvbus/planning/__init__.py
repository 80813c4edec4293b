"""Who reads what from whom, as runs of bytes, and by which path.

Addresses are numbers here.
"""

from kvbus.planning.boxes import (
    Piece,
    chosen_boxes,
    cut_for_digests,
    cut_into_boxes,
    num_pieces,
    piece_of,
)
from kvbus.planning.choose import Learned, Path, choose_path, least_box_bytes, usual_box_bytes
from kvbus.planning.mapping import (
    MAX_CHOICES,
    ReadMap,
    Share,
    bytes_by_group,
    check_compatible,
    position_bytes,
    span_bytes,
)
from kvbus.planning.run_plan import PlacedRank, RunPlan, SlotPlan
from kvbus.planning.runs import Lattice, Reads, Run, Runs
from kvbus.planning.spans import SpanMap, Spans, asked_states, tail_spans

__all__ = [
    "MAX_CHOICES",
    "Lattice",
    "Learned",
    "Path",
    "Piece",
    "PlacedRank",
    "ReadMap",
    "Reads",
    "Run",
    "RunPlan",
    "Runs",
    "Share",
    "SlotPlan",
    "SpanMap",
    "Spans",
    "asked_states",
    "bytes_by_group",
    "check_compatible",
    "choose_path",
    "chosen_boxes",
    "cut_for_digests",
    "cut_into_boxes",
    "least_box_bytes",
    "num_pieces",
    "piece_of",
    "position_bytes",
    "span_bytes",
    "tail_spans",
    "usual_box_bytes",
]
