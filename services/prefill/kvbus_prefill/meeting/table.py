"""All named offers of one prefill agent: admission, and the dispatch of events (sans-IO)."""

from msgspec.structs import replace

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
    kept_s = 600.0  # a name that was given up is not made by an engine that comes to it late

    def __init__(self, limits: MeetingLimits | None = None) -> None:
        limits = limits or MeetingLimits()
        super().__init__(
            limits,
            max_retired=limits.max_retired,
            max_retired_bytes=limits.max_retired_bytes,
        )
        self.draining = False
        self._engines_awaited_until: float | None = None
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

    def _names_of(self, entry: MeetingEntry) -> tuple[str, ...]:
        return (entry.offer_id,) if entry.offer_id else ()

    def _handle(self, event: ev.Event, now: float) -> Commands:
        """A handler that refuses does so by raising, before it changed anything."""
        match event:
            case ev.Awaited() | ev.Forgone() | ev.Abandoned():
                return self._answer(event, now)
            case ev.Ended(offer_id):
                name = self._by_offer.pop(offer_id, None)
                return [] if name is None else self._apply(self.live[name], event, now)
            case ev.Made(transfer_id, offer_id):
                self._by_offer[offer_id] = transfer_id
                entry = self.live.get(transfer_id) or self._new(transfer_id)
                return self._apply(entry, event, now)
            case ev.EngineReady():
                self._engines_awaited_until = None
            case ev.EnginesGone() if self._engines_awaited_until is None:
                self._engines_awaited_until = now + self.limits.engine_grace_s
                return self._apply_all(self._awaited(), event, now)
            case ev.DrainStarted():
                self.draining = True
                return self._apply_all(self._awaited(), event, now)
        return []

    def _answer(self, event: ev.Awaited | ev.Forgone | ev.Abandoned, now: float) -> Commands:
        try:
            if isinstance(event, ev.Awaited):
                event = self._within_grace(event, now)
            return self._apply(self._entry(event.transfer_id), event, now)
        except KVBusError as error:
            return [ev.Refuse(event.reply_to, error)]

    def _awaited(self) -> list[MeetingEntry]:
        return [one for one in self.live.values() if one.state is MeetingState.AWAITED]

    # An engine that is gone makes no offer, so its reader had better compute at once. It may also
    # be between two sessions, as when its agent was started again: that takes a moment.
    #
    #     engine  ready ──┤ gone                  grace ends
    #     asked     └─────┴▶ engine_lost              │
    #     asked               └───────────────────────┴▶ busy: the reader asks again
    #     asked                                            └▶ engine_not_ready, if none is ready
    def _within_grace(self, event: ev.Awaited, now: float) -> ev.Awaited:
        """Bound the wait for an offer that no engine can make now; raises `LocalError`."""
        until, known = self._engines_awaited_until, self.find(event.transfer_id)
        is_over = known is not None and known.state is not MeetingState.AWAITED
        if until is None or is_over or self.draining:
            return event
        if until <= now:
            raise LocalError(
                "no engine of this prefill agent is ready to make the offer",
                code=ErrorCode.ENGINE_NOT_READY,
            )
        return replace(event, wait_s=min(event.wait_s, until - now))

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
