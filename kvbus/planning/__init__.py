"""Who reads what from whom, and the descriptors of it.

Addresses are numbers here.
"""

from kvbus.planning.boxes import cut_into_boxes, reader_order
from kvbus.planning.compatibility import check_compatible
from kvbus.planning.copies import Copies, check_runs, check_sources, cut_copies
from kvbus.planning.cost import Rates
from kvbus.planning.direct import Descriptors, DirectPlan
from kvbus.planning.fetch_shape import FetchShape, Path
from kvbus.planning.fetch_work import FetchWork
from kvbus.planning.few_runs import Run
from kvbus.planning.mapping import ReadMap, Share
from kvbus.planning.observed import Overlaps, PeerRates
from kvbus.planning.pairs import PlacedRank
from kvbus.planning.slot_reads import SlotReads, from_slot, whole_slot
from kvbus.planning.spans import Spans, chunk_spans, tail_spans, whole_spans

__all__ = [
    "Copies",
    "Descriptors",
    "DirectPlan",
    "FetchShape",
    "FetchWork",
    "Overlaps",
    "Path",
    "PeerRates",
    "PlacedRank",
    "Rates",
    "ReadMap",
    "Run",
    "Share",
    "SlotReads",
    "Spans",
    "check_compatible",
    "check_runs",
    "check_sources",
    "chunk_spans",
    "cut_copies",
    "cut_into_boxes",
    "from_slot",
    "reader_order",
    "tail_spans",
    "whole_slot",
    "whole_spans",
]
