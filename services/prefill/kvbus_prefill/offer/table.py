"""All offers of one prefill agent: admission, names, and the dispatch of events (sans-IO)."""

from collections import OrderedDict
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol.message import check_right
from kvbus.protocol.peer import Forgo, Meet
from kvbus.table import Table
from kvbus.table.events import DrainStarted, EngineLost, Refuse, Stopped
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferedBox, OfferEntry, OfferLimits, OfferState
from kvbus_prefill.offer.transitions import TRANSITIONS, Commands, done, draining, ended, given_up

NAMES_KEPT_S = 600.0
"""How long a name that was used or given up is remembered: an engine may come to it late."""


class UsedName(NamedTuple):
    """A name of which no offer will be made: that of an offer that has ended, or was given up."""

    used_at: float
    code: ErrorCode
    offer_id: str


class OfferTable(Table[str, OfferEntry, OfferLimits, ev.Command]):
    """All offers of one agent, by offer id; the retired ones tell a late message what became.

    Refuses more offers, and more names that are awaited, than the limit, and a request or a name
    that is offered already.
    """

    transitions = TRANSITIONS

    def __init__(self, limits: OfferLimits | None = None) -> None:
        limits = limits or OfferLimits()
        super().__init__(
            limits,
            max_retired=limits.max_retired,
            max_retired_bytes=limits.max_retired_bytes,
        )
        self.draining = False
        self._engines_awaited_until: float | None = None
        self._requests: dict[tuple[str, str], str] = {}
        self._named: dict[str, OfferEntry] = {}
        self._used_names: OrderedDict[str, UsedName] = OrderedDict()

    @property
    def num_offers(self) -> int:
        """Those that are made and not released."""
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an offer."""
        return sum(len(offer.waiting) for offer in self._named.values())

    @property
    def num_leases(self) -> int:
        """Leases that are live now."""
        return sum(len(offer.live_leases) for offer in self.live.values())

    def num_reads(self) -> int:
        """Of these, those on offers that have all their tokens."""
        sealed = (one for one in self.live.values() if one.state is OfferState.SEALED)
        return sum(len(offer.live_leases) for offer in sealed)

    def awaited_as(self, transfer_id: str) -> str | None:
        """The id of the offer of this name that readers wait for, None when nobody does.

        Raises `LocalError` when an offer of this name was made, or shall not be made.
        """
        known = self._named.get(transfer_id) or self._used_names.get(transfer_id)
        if known is None:
            return None
        if isinstance(known, OfferEntry) and known.state is OfferState.AWAITED:
            return known.offer_id
        if isinstance(known, UsedName) and known.code is ErrorCode.CANCELLED:
            raise given_up()
        raise LocalError(
            "an offer with this transfer_id was made before",
            code=ErrorCode.OFFER_EXISTS,
            offer_id=known.offer_id,
        )

    def check_box(self, box: OfferedBox, now: float) -> None:
        """Raise `LocalError` or `GeometryError` unless the lease is live and the offer has it.

        A question: nothing changes. A lease whose time is up is not live, also when it has not
        been told yet.
        """
        offer = self._known(box.offer_id)
        offer.check_token(box.epoch, box.token)
        lease = offer.live_lease(box.epoch)
        if lease.expires_at <= now:
            raise LocalError("the lease of the offer ended", code=ErrorCode.LEASE_EXPIRED)
        offer.check_box(box)

    def check_read(self, box: OfferedBox, engine_id: str) -> None:
        """As `check_box`, for the ticket's secret in place of a lease: the offer must be live."""
        check_right(engine_id, self.check_reader(box.offer_id, box.secret))
        self._known(box.offer_id).check_box(box)

    def check_reader(self, offer_id: str, secret: str | None) -> str:
        """The engine of the live offer that has this secret; raises `LocalError`."""
        offer = self._known(offer_id)
        check_right(secret, offer.secret)
        if offer.is_over:
            raise ended(offer)
        return offer.engine_id

    def _names_of(self, entry: OfferEntry) -> tuple[str, ...]:
        return tuple(name for name in (entry.request_id, entry.transfer_id) if name)

    def _handle(self, event: ev.Event, now: float) -> Commands:
        """A handler that refuses does so by raising; it changes no more than how long to wait."""
        if isinstance(event, ev.Asked | ev.Opened):
            try:
                return self._answer(event, now)
            except KVBusError as error:
                return [Refuse(event.reply_to, error)]
        return self._apply_all(self._hit_by(event, now), event, now)

    def _hit_by(self, event: ev.Event, now: float) -> list[OfferEntry]:
        """The offers that an event is about which names no request."""
        match event:
            case ev.Abandoned(transfer_id):
                offer = self._named.get(transfer_id)
                return [] if offer is None else [offer]
            case EngineLost(engine_id):
                return [one for one in self.live.values() if one.engine_id == engine_id]
            case ev.EngineReady():
                self._engines_awaited_until = None
            case ev.EnginesGone() if self._engines_awaited_until is None:
                self._engines_awaited_until = now + self.limits.engine_grace_s
                return self._awaited()
            case DrainStarted() | Stopped():
                self.draining = True
                return self._awaited() if isinstance(event, DrainStarted) else [*self.live.values()]
        return []

    def _answer(self, event: ev.Asked[Any] | ev.Opened, now: float) -> Commands:
        if isinstance(event, ev.Opened):
            return self._open(event, now)
        if isinstance(event.message, Meet | Forgo):
            return self._answer_by_name(event, event.message, now)
        offer = self._known(event.message.offer_id)
        offer.check_right(event)
        return self._apply(offer, event, now)

    def _open(self, event: ev.Opened, now: float) -> Commands:
        self._check_admission(event)
        name = event.message.transfer_id or ""
        offer = self._named.get(name) or self._new(event.offer_id, name)
        self._requests[event.engine_id, event.message.request_id] = event.offer_id
        return self._apply(offer, event, now)

    def _check_admission(self, event: ev.Opened) -> None:
        if self.draining:
            raise draining()
        if event.message.transfer_id:
            self.awaited_as(event.message.transfer_id)
        known = self._requests.get((event.engine_id, event.message.request_id))
        if known is not None:
            raise LocalError(
                f"request '{event.message.request_id}' is already offered",
                code=ErrorCode.OFFER_EXISTS,
                offer_id=known,
            )
        if self.num_offers >= self.limits.max_offers:
            raise LocalError(
                f"{self.num_offers} offers are live, which is the limit",
                code=ErrorCode.BUSY,
                max_offers=self.limits.max_offers,
            )

    def _answer_by_name(self, event: ev.Asked[Any], message: Meet | Forgo, now: float) -> Commands:
        """The offer is awaited, made, over, or not known yet."""
        name = message.transfer_id
        offer, used = self._named.get(name), self._used_names.get(name)
        if isinstance(message, Forgo):
            if used is not None:
                return [done(event)]
        elif used is not None:
            over = LocalError("the offer is over", code=used.code)
            raise given_up() if used.code is ErrorCode.CANCELLED else over
        elif offer is None or offer.state is OfferState.AWAITED:
            event = self._within_grace(event, message, now)
            self._check_room_for(offer)
        return self._apply(offer or self._new(event.fresh, name), event, now)

    # An engine that is gone makes no offer, so its reader had better compute at once. It may also
    # be between two sessions, as when its agent was started again: that takes a moment.
    #
    #     engine  ready ──┤ gone                  grace ends
    #     asked     └─────┴▶ engine_lost              │
    #     asked               └───────────────────────┴▶ busy: the reader asks again
    #     asked                                            └▶ engine_not_ready, if none is ready
    def _within_grace(self, event: ev.Asked[Any], message: Meet, now: float) -> ev.Asked[Any]:
        """Bound the wait for an offer that no engine can make now; raises `LocalError`."""
        until = self._engines_awaited_until
        if until is None or self.draining:
            return event
        if until <= now:
            raise LocalError(
                "no engine of this prefill agent is ready to make the offer",
                code=ErrorCode.ENGINE_NOT_READY,
            )
        return replace(event, message=replace(message, wait_s=min(message.wait_s, until - now)))

    def _check_room_for(self, offer: OfferEntry | None) -> None:
        """Raise `LocalError` when nobody waits for the name yet, and too many are waited for."""
        if offer is not None:
            return
        if self.draining:
            raise draining()
        num_awaited = len(self._awaited())
        if num_awaited >= self.limits.max_offers:
            raise LocalError(
                f"{num_awaited} offers are waited for, which is the limit", code=ErrorCode.BUSY
            )

    def _awaited(self) -> list[OfferEntry]:
        return [one for one in self._named.values() if one.state is OfferState.AWAITED]

    def _new(self, offer_id: str, transfer_id: str) -> OfferEntry:
        """A name that is awaited, or an offer that is about to be made."""
        offer = self.live[offer_id] = OfferEntry(offer_id=offer_id, transfer_id=transfer_id)
        if transfer_id:
            self._named[transfer_id] = offer
        return offer

    def _known(self, offer_id: str) -> OfferEntry:
        offer = self.find(offer_id)
        if offer is None or offer.state is OfferState.AWAITED:
            raise LocalError(
                f"no offer '{offer_id}'", code=ErrorCode.OFFER_UNKNOWN, offer_id=offer_id
            )
        return offer

    def _retire(self, offer: OfferEntry) -> None:
        """One that was never made is not kept; a name that was given up is."""
        if offer.transfer_id:
            del self._named[offer.transfer_id]
        if offer.outcome is not None:
            del self._requests[offer.engine_id, offer.request_id]
            super()._retire(offer)
            self._remember_name(offer, ErrorCode(f"offer_{offer.outcome}"))
            return
        del self.live[offer.offer_id]
        if offer.ended_by is ErrorCode.CANCELLED:
            self._remember_name(offer, ErrorCode.CANCELLED)

    def _remember_name(self, offer: OfferEntry, code: ErrorCode) -> None:
        if not offer.transfer_id:
            return
        names, now = self._used_names, offer.story.steps[-1][0]
        names[offer.transfer_id] = UsedName(now, code, offer.offer_id)
        while (
            len(names) > self.limits.max_names
            or next(iter(names.values())).used_at < now - NAMES_KEPT_S
        ):
            names.popitem(last=False)
