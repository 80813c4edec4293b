"""Who reads what from whom, as runs of bytes, and by which path.

Addresses are numbers here.
"""

from kvbus.planning.boxes import cut_into_boxes
from kvbus.planning.choose import (
    Learned,
    Path,
    choose_path,
    held_bytes,
    least_box_bytes,
    read_bytes,
    usual_box_bytes,
)
from kvbus.planning.compatibility import check_compatible
from kvbus.planning.digests import (
    Piece,
    chosen_boxes,
    cut_for_digests,
    num_pieces,
    piece_of,
)
from kvbus.planning.mapping import MAX_CHOICES, ReadMap, Share
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
    "check_compatible",
    "choose_path",
    "chosen_boxes",
    "cut_for_digests",
    "cut_into_boxes",
    "held_bytes",
    "least_box_bytes",
    "num_pieces",
    "piece_of",
    "read_bytes",
    "tail_spans",
    "usual_box_bytes",
]
