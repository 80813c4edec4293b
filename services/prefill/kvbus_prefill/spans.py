"""What the prefill agent remembers of offers, as spans: their states, leases, and boxes gathered.

Refuses to record anything: all of it comes out of the stories of the tables.
"""

from collections.abc import Callable, Iterable
from functools import partial

from msgspec.structs import replace

from kvbus.agent.spans import (
    Reading,
    asked_span,
    command_spans,
    forgotten_span,
    last_end,
    nested,
    state_spans,
)
from kvbus.protocol.trace import Remembered, Span, Trace, trace_attributes
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferEntry, OfferState
from kvbus_prefill.offer.table import OfferTable
from kvbus_prefill.slots.entry import SlotEntry, SlotState

OFFER = Reading(ends=(OfferState.RELEASED,))
BOX = Reading(ends=(SlotState.OVER,))
LEASE = "leased"


class OfferSpans:
    """The offers of ``offers``, and boxes by the id of their offer."""

    def __init__(self, offers: OfferTable, boxes: Callable[[str], Iterable[SlotEntry]]) -> None:
        self._offers, self._boxes = offers, boxes

    def remembered(self, asked: Trace) -> Remembered:
        """The offers that are asked for; boxes of an offer whose engine has its home elsewhere."""
        offers = self._found(asked)
        entries = [self.of(offer) for offer in offers]
        if asked.offer_id and not offers:
            boxes = _box_spans(self._boxes(asked.offer_id), depth=0)
            entries += [boxes] if boxes else []
        return Remembered(tuple(map(tuple, entries)))

    def recent(self, number: int) -> list[Callable[[], list[Span]]]:
        """What makes the spans of the newest offers, in any thread; live ones come first."""
        newest = self._offers.newest(number)
        return [self.later(one) if one.is_over else partial(list, self.of(one)) for one in newest]

    def of(self, offer: OfferEntry) -> list[Span]:
        """One offer: itself, its states, its leases, and the boxes in these."""
        return self.later(offer)()

    def later(self, offer: OfferEntry) -> Callable[[], list[Span]]:
        """`of`, to be called in any thread when the offer has ended; no table is asked then."""
        return partial(_spans, offer, tuple(self._boxes(offer.key)))

    def _found(self, asked: Trace) -> list[OfferEntry]:
        found, offer = self._offers.named(asked.request_id), self._offers.find(asked.offer_id)
        if offer is None or any(one is offer for one in found):
            return found
        return [*found, offer]


def _spans(offer: OfferEntry, boxes: Iterable[SlotEntry]) -> list[Span]:
    story, states = offer.story, state_spans(offer.story, OFFER, depth=1)
    waited = [replace(one, depth=0) for one in states if one.name == OfferState.AWAITED]
    states = forgotten_span(story, depth=1) + states[len(waited) :]
    made_at = offer.opened_at
    there = asked_span(story, offer.asked_s, depth=1, started_at=made_at)
    parts = there + states
    root = Span(
        name="offer",
        start_s=parts[0].start_s if parts else made_at,
        end_s=last_end(parts) or (made_at if not parts else None),
        attributes=_attributes(offer),
    )
    leases = command_spans(story, ev.BeginLease, ev.EndLease, name=LEASE, depth=1)
    inner = nested(leases, _box_spans(boxes, depth=2))
    return [*waited, root, *there, *states, *inner] if made_at else waited


def _box_spans(boxes: Iterable[SlotEntry], *, depth: int) -> list[Span]:
    spans = (
        _of_box(span, box) for box in boxes for span in state_spans(box.story, BOX, depth=depth)
    )
    return sorted(spans, key=lambda span: span.start_s)


def _of_box(span: Span, box: SlotEntry) -> Span:
    num_bytes = box.asked.num_bytes
    return Span(
        span.name,
        span.start_s,
        span.end_s,
        span.depth,
        f"box {box.slot_id}",
        span.error,
        {"num_bytes": num_bytes},
    )


def _attributes(offer: OfferEntry) -> dict[str, str | int | float]:
    return {
        "request_id": offer.request_id,
        "offer_id": offer.offer_id,
        "engine_id": offer.engine_id,
        "state": str(offer.outcome or offer.state),
        "num_tokens": offer.num_tokens,
        "readers": offer.readers,
        **trace_attributes(offer.traceparent),
    }
