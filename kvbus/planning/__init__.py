"""Read plans: which rank reads which bytes from which rank."""

from kvbus.planning.choose import Learned, Path, choose_path, least_tile_bytes, usual_tile_bytes
from kvbus.planning.mapping import (
    MAX_CHOICES,
    ReadMap,
    Share,
    bytes_by_group,
    check_compatible,
    position_bytes,
    span_bytes,
)
from kvbus.planning.run_plan import MAX_FEW, PlacedRank, RunPlan, SlotPlan
from kvbus.planning.runs import Extents, Lattice, Reads, Run, Runs
from kvbus.planning.spans import Span, SpanMap, Spans, Tables, requested_states, tail_spans
from kvbus.planning.staged import StagedPlan, staged_plans
from kvbus.planning.tiles import (
    Piece,
    chosen_tiles,
    cut_for_digests,
    cut_into_tiles,
    num_pieces,
    piece_of,
)

__all__ = [
    "MAX_CHOICES",
    "MAX_FEW",
    "Extents",
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
    "Span",
    "SpanMap",
    "Spans",
    "StagedPlan",
    "Tables",
    "bytes_by_group",
    "check_compatible",
    "choose_path",
    "chosen_tiles",
    "cut_for_digests",
    "cut_into_tiles",
    "least_tile_bytes",
    "num_pieces",
    "piece_of",
    "position_bytes",
    "requested_states",
    "span_bytes",
    "staged_plans",
    "tail_spans",
    "usual_tile_bytes",
]
