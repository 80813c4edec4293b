"""All named offers of one prefill agent: admission, and the dispatch of events (sans-IO)."""

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.table import Table
from kvbus_prefill.meeting import events as ev
from kvbus_prefill.meeting.entry import (
    TRANSITIONS,
    Commands,
    MeetingEntry,
    MeetingLimits,
    MeetingState,
    draining,
    given_up,
)


class MeetingTable(Table[str, MeetingEntry, MeetingLimits, ev.Command]):
    """All names, by transfer id; the retired ones are never made again.

    Refuses more names that are waited for than the limit, and more readers of one that wait.
    """

    transitions = TRANSITIONS

    def __init__(self, limits: MeetingLimits | None = None) -> None:
        limits = limits or MeetingLimits()
        super().__init__(
            limits,
            max_retired=limits.max_retired,
            max_retired_bytes=limits.max_retired_bytes,
        )
        self.draining = False
        self._by_offer: dict[str, str] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an offer."""
        return sum(len(meeting.waiting) for meeting in self.live.values())

    def check_free(self, transfer_id: str) -> None:
        """Raise `LocalError` when an offer of this name was made, or shall not be made."""
        known = self.find(transfer_id)
        if known is None or known.state is MeetingState.AWAITED:
            return
        if known.state is MeetingState.FORGONE:
            raise given_up()
        raise LocalError(
            "an offer with this transfer_id was made before",
            code=ErrorCode.OFFER_EXISTS,
            offer_id=known.offer_id,
        )

    def of_offer(self, offer_id: str) -> MeetingEntry | None:
        """The name of an offer, live or retired, if it has one that is known."""
        name = self._by_offer.get(offer_id)
        if name is not None:
            return self.live[name]
        return next((self.retired[key] for key in self._retired_as.get(offer_id, ())), None)

    def _name_of(self, entry: MeetingEntry) -> str:
        return entry.offer_id

    def _handle(self, event: ev.Event, now: float) -> Commands:
        """A handler that refuses does so by raising, before it changed anything."""
        match event:
            case ev.DeadlinePassed():
                return []
            case ev.DrainStarted():
                self.draining = True
                awaited = [one for one in self.live.values() if one.state is MeetingState.AWAITED]
                return self._apply_all(awaited, event, now)
            case ev.Ended(offer_id):
                name = self._by_offer.pop(offer_id, None)
                return [] if name is None else self._apply(self.live[name], event, now)
            case ev.Made(transfer_id, offer_id):
                self._by_offer[offer_id] = transfer_id
                entry = self.live.get(transfer_id) or self._new(transfer_id)
                return self._apply(entry, event, now)
        try:
            return self._apply(self._entry(event.transfer_id), event, now)
        except KVBusError as error:
            return [ev.Refuse(event.reply_to, error)]

    def _entry(self, transfer_id: str) -> MeetingEntry:
        """The one of this name, new when it is not known."""
        known = self.find(transfer_id)
        if known is not None:
            return known
        if self.draining:
            raise draining()
        num_awaited = len(self.live) - len(self._by_offer)
        if num_awaited >= self.limits.max_names:
            raise LocalError(
                f"{num_awaited} offers are waited for, which is the limit", code=ErrorCode.BUSY
            )
        return self._new(transfer_id)

    def _new(self, transfer_id: str) -> MeetingEntry:
        entry = self.live[transfer_id] = MeetingEntry(transfer_id)
        return entry

    def _retire(self, entry: MeetingEntry) -> None:
        if entry.state is MeetingState.LEFT:
            del self.live[entry.key]
        else:
            super()._retire(entry)
