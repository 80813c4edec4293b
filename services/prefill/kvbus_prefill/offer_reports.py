"""Metrics and spans of offers."""

from collections.abc import Callable, Iterable
from functools import partial

from msgspec.structs import replace

from kvbus.agent.observe import AgentMetrics
from kvbus.agent.spans import (
    Histories,
    Reading,
    command_spans,
    forgotten_span,
    last_end,
    nested,
    sending_span,
    state_spans,
)
from kvbus.protocol.tools import Span, Status, Trace, TraceResult, trace_attributes
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferEntry, OfferState
from kvbus_prefill.offer.table import OfferTable
from kvbus_prefill.slot_table import SlotEntry, SlotState, SlotTable

READINGS = {
    "offers": "Live offers.",
    "parked_offers": "Live parked offers.",
    "pool_bytes": "Memory of pools for parked offers.",
    "pool_used_bytes": "Bytes of pool blocks in use.",
    "leases": "Live leases.",
    "awaited_offers": "Requests for tickets of offers that are not made yet.",
    "held_offers": "Offers that queued readers hold.",
    "packs": "Tiles that wait for a staging slot.",
    "slots": "Staging slots in use.",
    "waiting_requests": "Requests that wait for GPU work.",
    "ended_bytes": "Memory of records of ended offers.",
    "engines": "Local engines.",
    "progress_tokens": "Reasons to drive NIXL: leases, late reads, handshakes.",
    "memory_readers": "Decode agents' maps of an engine's memory.",
}


class PrefillMetrics:
    # No labels for requests, offers or peers: these are unbounded.
    def __init__(self, agent: AgentMetrics) -> None:
        self.offers = agent.tally("kvbus_offers", "Ended offers.", "outcome")
        self.parked = agent.tally(
            "kvbus_parked_ends",
            "Ended parked offers; completed ones were read from the pool.",
            "outcome",
        )
        self.parked_bytes = agent.tally("kvbus_parked_bytes", "Bytes copied into pools.")
        self.park_s = agent.times(
            "kvbus_park_seconds", "Time from the seal of an offer until it was parked."
        )
        self.leases = agent.tally("kvbus_leases", "Ended leases.", "reason")
        self.offer_life_s = agent.times(
            "kvbus_offer_life_seconds", "Time from an offer to its release."
        )
        self.packed_bytes = agent.tally("kvbus_packed_bytes", "Bytes gathered into staging slots.")
        self.gather_s = agent.times(
            "kvbus_gather_seconds", "Time of one gather into a staging slot."
        )


OFFER = Reading(ends=(OfferState.RELEASED,))
TILE = Reading(ends=(SlotState.OVER,))
LEASE = "leased"


class OfferHistories(Histories[OfferEntry]):
    def __init__(self, offers: OfferTable, slots: SlotTable) -> None:
        super().__init__(offers)
        self._offers, self._tiles = offers, slots.named

    def lines(self, request: Status) -> list[str]:
        offer = self._offers.find(request.offer_id)
        return [] if offer is None else list(offer.history.lines())

    def remembered(self, request: Trace) -> TraceResult:
        offers, named = self._offers.named(request.request_id), self._offers.find(request.offer_id)
        if named is not None and named not in offers:
            offers.append(named)
        entries = [self.later(offer)() for offer in offers]
        if request.offer_id and not offers:
            tiles = _tile_spans(self._tiles(request.offer_id), depth=0)
            entries += [tiles] if tiles else []
        return TraceResult(tuple(map(tuple, entries)))

    def later(self, offer: OfferEntry) -> Callable[[], list[Span]]:
        return partial(_spans, offer, tuple(self._tiles(offer.key)))


def _spans(offer: OfferEntry, tiles: Iterable[SlotEntry]) -> list[Span]:
    history, states = offer.history, state_spans(offer.history, OFFER, depth=1)
    waited = [replace(one, depth=0) for one in states if one.name == OfferState.AWAITED]
    states = forgotten_span(history, depth=1) + states[len(waited) :]
    made_at = offer.opened_at
    there = sending_span(history, offer.sent_s, depth=1, started_at=made_at)
    parts = there + states
    root = Span(
        name="offer",
        start_s=parts[0].start_s if parts else made_at,
        end_s=last_end(parts) or (made_at if not parts else None),
        attributes={
            "request_id": offer.request_id,
            "offer_id": offer.offer_id,
            "engine_id": offer.engine_id,
            "state": str(offer.outcome or offer.state),
            "num_tokens": offer.num_tokens,
            "readers": offer.readers,
            **trace_attributes(offer.traceparent),
        },
    )
    leases = command_spans(history, ev.BeginLease, ev.EndLease, name=LEASE, depth=1)
    inner = nested(leases, _tile_spans(tiles, depth=2))
    return [*waited, root, *there, *states, *inner] if made_at else waited


def _tile_spans(tiles: Iterable[SlotEntry], *, depth: int) -> list[Span]:
    spans = [
        replace(span, about=f"tile {tile.slot_id}", attributes={"num_bytes": tile.wanted.num_bytes})
        for tile in tiles
        for span in state_spans(tile.history, TILE, depth=depth)
    ]
    return sorted(spans, key=lambda span: span.start_s)
