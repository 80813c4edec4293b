"""All offers of one prefill agent: admission, expiry, and the dispatch of events (sans-IO).

Refuses clocks, sockets, logs and random numbers: events and times come in, commands come out.
Refuses more offers than the limit, and a request that is offered already.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol.engine import OfferMade
from kvbus.table.deadlines import Deadlines
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferEntry, OfferLimits, OfferState
from kvbus_prefill.offer.transitions import TRANSITIONS, Commands, Context


@dataclass(slots=True)
class OfferTable:
    """All offers of one agent; `handle` is the only way to change anything.

    ``offers`` holds the live ones, ``tombstones`` the last ended ones, so that a late message is
    told what became of its offer.
    """

    limits: OfferLimits = field(default_factory=OfferLimits)
    offers: dict[str, OfferEntry] = field(default_factory=dict)
    tombstones: OrderedDict[str, OfferEntry] = field(default_factory=OrderedDict)
    draining: bool = False
    _requests: dict[tuple[str, str], str] = field(default_factory=dict)
    _deadlines: Deadlines[str] = field(default_factory=Deadlines)

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        """Apply ``event`` at time ``now`` and return what the agent has to do, in order.

        Whatever is due by ``now`` expires first: a confirm that comes too late is stale even when
        nobody told the table in between that time went by.
        """
        commands = self._expire(now)
        match event:
            case ev.Opened():
                return commands + _answered(event, lambda: self._open(event, now))
            case ev.EngineLost(engine_id):
                mine = [o for o in self.offers.values() if o.opened.engine_id == engine_id]
                return commands + self._apply_all(mine, event, now)
            case ev.Stopped():
                self.draining = True
                return commands + self._apply_all(list(self.offers.values()), event, now)
            case ev.DrainStarted():
                self.draining = True
                return commands
            case ev.DeadlinePassed():
                return commands
            case _:
                return commands + _answered(event, lambda: self._dispatch(event, now))

    def next_deadline(self) -> float | None:
        """When to send `DeadlinePassed` at the latest, or None while nothing can expire."""
        return self._deadlines.next()

    def num_leases(self) -> int:
        """Leases that are live now."""
        return sum(offer.lease is not None for offer in self.offers.values())

    def _open(self, event: ev.Opened, now: float) -> Commands:
        self._check_admission(event)
        offer = OfferEntry(
            opened=event,
            state=OfferState.SEALED if event.sealed else OfferState.OPEN,
            num_tokens=event.num_tokens,
            tables=dict(event.tables),
            expires_at=now + event.ttl_s,
            opened_at=now,
        )
        self.offers[event.offer_id] = offer
        self._requests[event.engine_id, event.request_id] = event.offer_id
        self._deadlines.set(event.offer_id, offer.deadline)
        made = OfferMade(offer_id=event.offer_id, ticket=dict(event.ticket))
        return [ev.SendReply(event.reply_to, made), offer.published("offer.opened")]

    def _check_admission(self, event: ev.Opened) -> None:
        if self.draining:
            raise LocalError("the agent is draining", code=ErrorCode.DRAINING)
        known = self._requests.get((event.engine_id, event.request_id))
        if known is not None:
            raise LocalError(
                f"request '{event.request_id}' is already offered",
                code=ErrorCode.OFFER_EXISTS,
                offer_id=known,
            )
        if len(self.offers) >= self.limits.max_offers:
            raise LocalError(
                f"{len(self.offers)} offers are live, which is the limit",
                code=ErrorCode.BUSY,
                max_offers=self.limits.max_offers,
            )

    def _dispatch(self, event: ev.RequestEvent, now: float) -> Commands:
        offer = self.offers.get(event.offer_id) or self.tombstones.get(event.offer_id)
        if offer is None:
            raise LocalError(
                f"no offer '{event.offer_id}'",
                code=ErrorCode.OFFER_UNKNOWN,
                offer_id=event.offer_id,
            )
        return self._apply(offer, event, now)

    def _apply(self, offer: OfferEntry, event: ev.Event, now: float) -> Commands:
        transition = TRANSITIONS[offer.state, type(event)]
        commands = transition.handler(offer, event, Context(now, self.limits))
        if offer.state is not OfferState.RELEASED:
            self._deadlines.set(offer.offer_id, offer.deadline)
        elif offer.offer_id in self.offers:
            self._retire(offer)
        return commands

    def _apply_all(self, offers: list[OfferEntry], event: ev.Event, now: float) -> Commands:
        return [command for offer in offers for command in self._apply(offer, event, now)]

    def _retire(self, offer: OfferEntry) -> None:
        del self.offers[offer.offer_id]
        del self._requests[offer.opened.engine_id, offer.opened.request_id]
        self._deadlines.discard(offer.offer_id)
        self.tombstones[offer.offer_id] = offer
        while len(self.tombstones) > self.limits.max_tombstones:
            self.tombstones.popitem(last=False)

    def _expire(self, now: float) -> Commands:
        due = [self.offers[offer_id] for offer_id in self._deadlines.pop_due(now)]
        return self._apply_all(due, ev.DeadlinePassed(), now)


def _answered(event: ev.RequestEvent, handler: Callable[[], Commands]) -> Commands:
    """A handler that refuses does so by raising, before it changed anything."""
    try:
        return handler()
    except KVBusError as error:
        return [ev.Refuse(event.reply_to, error)]
