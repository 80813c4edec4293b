"""One chunk: tokens of a fetch that are read together, into the ranks that are here."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvbus.geometry import BlockTable
from kvbus.planning import Spans, chunk_spans, tail_spans, whole_spans
from kvbus_decode.peer.route import Route


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions by group, from the offer's blocks into the fetch's.

    ``replica_index`` chooses among ranks that hold the same. ``tail`` are positions behind the last
    token that are zeroed after the read. ``epoch`` is that of the lease, ``deadline`` a time of the
    event loop.
    """

    route: Route
    offer_id: str
    epoch: int
    source: Mapping[str, BlockTable]
    target: Mapping[str, BlockTable]
    spans: Spans
    tail: Spans
    replica_index: int
    deadline: float


def is_empty(spans: Spans) -> bool:
    """Whether a chunk moves nothing, as one that only zeroes a tail."""
    return all(stop <= start for start, stop in spans.values())


def make_chunk(
    route: Route,
    *,
    offer_id: str,
    epoch: int,
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
    return Chunk(route, offer_id, epoch, source, target, spans, tail, replica_index, deadline)
