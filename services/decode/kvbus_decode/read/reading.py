"""Carries out the reads of the fetch table: each piece here, and at the siblings of our engine.

Refuses to decide: the end of a piece goes back to the table as an event, exactly one for each.
"""

from collections.abc import Callable

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.planning import Spans, piece_spans, tail_spans, whole_spans
from kvbus_decode.active import ActiveFetch, ActiveFetches
from kvbus_decode.fetch import events as ev
from kvbus_decode.read.piece import Piece, PieceRead
from kvbus_decode.read.pieces import PieceReader
from kvbus_decode.read.siblings import Siblings


class Reader:
    """Reads for the fetches in ``works``; ``dispatch`` takes the events of their ends."""

    def __init__(
        self,
        pieces: PieceReader,
        siblings: Siblings,
        works: ActiveFetches,
        dispatch: Callable[[ev.Event], None],
    ) -> None:
        self._pieces, self._siblings = pieces, siblings
        self._works, self._dispatch = works, dispatch

    def start_read(self, command: ev.StartRead) -> None:
        """Read a piece of a fetch."""
        work = self._works[command.fetch_id]
        try:
            piece = _piece(work, command)
        except KVBusError as error:
            self._dispatch(ev.ReadEnded(work.fetch_id, 0, error))
            return
        read = self._pieces.open(piece, lambda read: self._end(work, read))
        work.read = read
        self._siblings.start(work, command, read)
        self._pieces.start(read)

    def abort_read(self, command: ev.AbortRead) -> None:
        """Start nothing more; the read's end follows."""
        read = self._works[command.fetch_id].read
        if read is not None:
            read.abort()

    def _end(self, work: ActiveFetch, read: PieceRead) -> None:
        work.read = None
        path = read.path if read.num_bytes else ""
        self._dispatch(ev.ReadEnded(work.fetch_id, read.num_bytes, read.error, path))


def _piece(work: ActiveFetch, command: ev.StartRead) -> Piece:
    requested, route = work.requested, work.route
    if route is None:
        raise LocalError("the fetch has no route", code=ErrorCode.INTERNAL)
    spans = piece_spans(
        route.prefill.groups,
        (requested.first_token, requested.num_tokens),
        (command.start, command.stop),
        last=command.last,
    )
    route.check_tables(command.tables, spans)
    tail: Spans = {}
    if requested.zero_tail and command.last:
        groups = work.engine.spec.groups
        whole = whole_spans(groups, requested.first_token, requested.num_tokens)
        tail = tail_spans(groups, whole)
    return Piece(
        route=route,
        offer_id=requested.ticket.offer_id,
        epoch=command.epoch,
        source=command.tables,
        target=requested.tables,
        spans=spans,
        tail=tail,
        spread=work.spread,
        deadline=work.deadline,
    )
