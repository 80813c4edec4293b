"""Who reads what from whom, and the descriptors of it.

Addresses are numbers here.
"""

from kvbus.planning.boxes import cut_into_boxes, reader_order
from kvbus.planning.compatibility import check_compatible
from kvbus.planning.digests import (
    Piece,
    chosen_boxes,
    cut_for_digests,
    num_pieces,
    piece_of,
)
from kvbus.planning.fetch_shape import (
    ALL_PATHS,
    FEW_RUNS,
    LONG_RUN_BYTES,
    SHORT_BYTES,
    FetchShape,
    Path,
    PathWork,
    choose_path,
    usual_box_bytes,
)
from kvbus.planning.fetch_work import FetchWork
from kvbus.planning.mapping import MAX_CHOICES, ReadMap, Share
from kvbus.planning.run_plan import PlacedRank, RunPlan, slot_plan, slot_rank
from kvbus.planning.runs import Lattice, Reads, Run, Runs
from kvbus.planning.spans import Spans, chunk_spans, tail_spans, whole_spans

__all__ = [
    "ALL_PATHS",
    "FEW_RUNS",
    "LONG_RUN_BYTES",
    "MAX_CHOICES",
    "SHORT_BYTES",
    "FetchShape",
    "FetchWork",
    "Lattice",
    "Path",
    "PathWork",
    "Piece",
    "PlacedRank",
    "ReadMap",
    "Reads",
    "Run",
    "RunPlan",
    "Runs",
    "Share",
    "Spans",
    "check_compatible",
    "choose_path",
    "chosen_boxes",
    "chunk_spans",
    "cut_for_digests",
    "cut_into_boxes",
    "num_pieces",
    "piece_of",
    "reader_order",
    "slot_plan",
    "slot_rank",
    "tail_spans",
    "usual_box_bytes",
    "whole_spans",
]
