"""All offers of one prefill agent: admission, expiry, and the dispatch of events (sans-IO)."""

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol.engine import OfferMade
from kvbus.protocol.rights import check_right
from kvbus.table import Table
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferedBox, OfferEntry, OfferLimits, OfferState
from kvbus_prefill.offer.transitions import TRANSITIONS, Commands, ended


class OfferTable(Table[str, OfferEntry, OfferLimits, ev.Command]):
    """All offers of one agent, by offer id; the retired ones tell a late message what became.

    Refuses more offers than the limit, and a request that is offered already.
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
        self._requests: dict[tuple[str, str], str] = {}

    def _handle(self, event: ev.Event, now: float) -> Commands:
        """A handler that refuses does so by raising; it changes no more than how long to wait."""
        if isinstance(event, ev.TableEvent):
            return self._handle_all(event, now)
        try:
            if isinstance(event, ev.Opened):
                return self._open(event, now)
            offer = self._known(event.offer_id)
            offer.check_right(event)
            return self._apply(offer, event, now)
        except KVBusError as error:
            return [ev.Refuse(event.reply_to, error)]

    def _handle_all(self, event: ev.TableEvent, now: float) -> Commands:
        offers = list(self.live.values())
        match event:
            case ev.EngineLost(engine_id):
                mine = [offer for offer in offers if offer.opened.engine_id == engine_id]
                return self._apply_all(mine, event, now)
            case ev.Stopped():
                self.draining = True
                return self._apply_all(offers, event, now)
            case ev.DrainStarted():
                self.draining = True
        return []

    def num_leases(self) -> int:
        """Leases that are live now."""
        return sum(len(offer.live_leases) for offer in self.live.values())

    def num_reads(self) -> int:
        """Of these, those on offers that have all their tokens."""
        sealed = (one for one in self.live.values() if one.state is OfferState.SEALED)
        return sum(len(offer.live_leases) for offer in sealed)

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
        """As `check_box`, for who shows the ticket's secret: of an offer that has not ended."""
        check_right(engine_id, self.check_reader(box.offer_id, box.secret))
        self._known(box.offer_id).check_box(box)

    def check_reader(self, offer_id: str, secret: str | None) -> str:
        """The engine of a live offer, for who shows its secret; raises `LocalError`."""
        offer = self._known(offer_id)
        check_right(secret, offer.opened.secret)
        if offer.is_over:
            raise ended(offer)
        return offer.opened.engine_id

    def _names_of(self, entry: OfferEntry) -> tuple[str, ...]:
        return (entry.opened.request_id,)

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
        self._requests[event.engine_id, event.request_id] = event.offer_id
        made = OfferMade(event.offer_id, dict(event.ticket), event.ticket_blocks)
        commands: Commands = [ev.SendReply(event.reply_to, made), offer.published("offer.opened")]
        self._add(offer, event, now, commands)
        return commands

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
        if len(self.live) >= self.limits.max_offers:
            raise LocalError(
                f"{len(self.live)} offers are live, which is the limit",
                code=ErrorCode.BUSY,
                max_offers=self.limits.max_offers,
            )

    def _known(self, offer_id: str) -> OfferEntry:
        offer = self.find(offer_id)
        if offer is None:
            raise LocalError(
                f"no offer '{offer_id}'", code=ErrorCode.OFFER_UNKNOWN, offer_id=offer_id
            )
        return offer

    def _retire(self, offer: OfferEntry) -> None:
        del self._requests[offer.opened.engine_id, offer.opened.request_id]
        super()._retire(offer)
