"""Table of all offers: admission, names and dispatch (sans-IO)."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.fair import Tenant
from kvbus.protocol.engine import ExtendOffer, MakeOffer, ParkOffer, SealOffer
from kvbus.protocol.message import check_right, is_right
from kvbus.protocol.peer import (
    AwaitOffer,
    Commit,
    CommitAnswer,
    CommitQuery,
    Decline,
    Digest,
    HeldOffer,
    OffersKept,
    Pack,
    Release,
    Renew,
)
from kvbus.table.events import DrainStarted, EngineLost, Refuse, SendReply, Stopped
from kvbus.table.table import Table
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import Context, OfferEntry, OfferLimits, OfferState
from kvbus_prefill.offer.events import Commands
from kvbus_prefill.offer.kept_names import KeptNames
from kvbus_prefill.offer.transitions import TRANSITIONS, declined, done, draining, ended

NAMES_KEPT_S = 600.0
"""An engine may use a name late."""


KEEPING = (MakeOffer, AwaitOffer, Renew, Release, ExtendOffer, SealOffer, ParkOffer, ev.Abandoned)
"""Events that neither end an offer nor give it to a reader."""
OUTLIVED = (ErrorCode.ENGINE_LOST, ErrorCode.DRAINING)
"""Codes of offers that live on in their engine after they ended here."""


class UsedName(NamedTuple):
    """Name without a future offer: its offer has ended, or was declined."""

    used_at: float
    code: ErrorCode


class OfferTable(Table[str, OfferEntry, OfferLimits, ev.Command]):
    """Offers by id; retired ones answer late messages."""

    transitions = TRANSITIONS

    def __init__(self, limits: OfferLimits | None = None) -> None:
        limits = limits or OfferLimits()
        super().__init__(limits, max_retired_bytes=limits.max_retired_bytes)
        self.draining = False
        self._engines_awaited_until: float | None = None
        self._offer_id_by_request: dict[tuple[str, str], str] = {}
        self._parked: dict[str, OfferEntry] = {}
        """Their requests may be offered again."""
        self._named: dict[str, OfferEntry] = {}
        self._used_names: OrderedDict[str, UsedName] = OrderedDict()
        self._kept_names = KeptNames(limits.max_names)

    @property
    def num_offers(self) -> int:
        return len(self._offer_id_by_request) + len(self._parked)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def num_waiting(self) -> int:
        return sum(len(offer.waiting) for offer in self._named.values())

    @property
    def num_leases(self) -> int:
        return sum(len(offer.live_leases) for offer in self.live.values())

    @property
    def num_held(self) -> int:
        return sum(offer.is_held for offer in self.live.values())

    # Queries without side effects.

    def check_pack(self, pack: Pack, now: float, *, is_state: bool) -> None:
        """Raise `KVBusError` unless the lease is live and the offer has the tile."""
        offer = self._known(pack.offer_id)
        offer.check_token(pack.epoch, pack.token)
        if offer.live_lease(pack.epoch).expires_at <= now:  # `_expire` may be late
            raise LocalError("the lease of the offer ended", code=ErrorCode.LEASE_EXPIRED)
        check_right(pack.engine_id, offer.memory_engine_id)
        offer.check_tile(pack, is_state=is_state)

    def check_digest(self, request: Digest, *, is_state: bool) -> None:
        """Check as `check_pack`, with the ticket's secret instead of a lease."""
        offer = self.check_source(request.offer_id, request.secret, request.engine_id)
        offer.check_tile(request, is_state=is_state)

    def check_parked(self, request: Digest) -> None:
        """Raise `KVBusError` if the reader must read the offer from a pool."""
        offer = self.live.get(request.offer_id)
        if offer is not None and offer.pooled is not None:
            check_right(request.secret, offer.secret)
            offer.check_engine(request.engine_id)

    def check_source(self, offer_id: str, secret: str | None, engine_id: str) -> OfferEntry:
        """Raise `KVBusError` unless the engine's memory has the blocks of the live offer."""
        offer = self.check_reader(offer_id, secret)
        offer.check_engine(engine_id)
        check_right(engine_id, offer.memory_engine_id)
        return offer

    def check_reader(self, offer_id: str, secret: str | None) -> OfferEntry:
        offer = self._known(offer_id)
        check_right(secret, offer.secret)
        if offer.is_over:
            raise ended(offer)
        return offer

    def is_committed(self, commit: Commit, holder: str) -> bool:
        offer = self.find(commit.offer_id)
        return offer is not None and offer.has_committed(commit.token, holder)

    def may_be_published(self, request: CommitQuery) -> bool:
        """Return whether the offer is unknown: its engine may publish it again."""
        return self._committed(request) is None

    def _committed(self, request: CommitQuery) -> OfferEntry | None:
        if not request.offer_id:
            named = reversed(self.named(request.secret))
            return next((one for one in named if one.transfer_id == request.secret), None)
        offer = self.find(request.offer_id)
        if offer is not None:
            check_right(request.secret, offer.secret)
        return offer

    # A negative answer is binding. A commit of the reader's earlier process may still arrive, and
    # would end the offer during the second read. The second commit has the same token, and would
    # then succeed.
    #
    #     earlier process   commit ──────────────────────────▶ stale
    #     next process            query: no ──▶ reads again ──▶ commit: yes
    #     offer                   └ denied: the token, but to the next process
    def _answer_committed(self, event: ev.RequestReceived[CommitQuery], now: float) -> Commands:
        request, offer = event.message, self._committed(event.message)
        is_committed = offer is not None and offer.has_committed(request.token, event.holder)
        if offer is None or not is_committed:
            if offer is not None and not offer.is_over:
                offer.deny(request, self.limits.max_denied)
            return [SendReply(event.reply_to, CommitAnswer(committed=False))]
        commands: Commands = [SendReply(event.reply_to, CommitAnswer(True, offer.num_tokens))]
        if offer.cell is None or offer.is_over:
            return commands
        # Its reader crashed before its report.
        committed = ev.CellCommitted(offer.offer_id, request.token)
        return commands + self._apply(offer, committed, now)

    # A history has room for 32 steps, which renewals every few seconds would fill. So this is no
    # transition, and the history notes the first one only.
    def _keep(self, event: ev.KeepRequested, now: float) -> Commands:
        at, keep_s = Context(now, self.limits), min(event.message.keep_s, self.limits.max_lease_s)
        held = enumerate(event.message.offers)
        over = tuple(i for i, one in held if not self._keep_one(one, keep_s, event, at))
        return [SendReply(event.reply_to, OffersKept(keep_s, over))]

    def _keep_one(
        self, held: HeldOffer, keep_s: float, event: ev.KeepRequested, at: Context
    ) -> bool:
        if not held.offer_id:
            offer = self._named.get(held.secret)
            if offer is None or offer.state is OfferState.AWAITED:
                return self._keep_name(held.secret, at.now, keep_s, event.tenant)
        elif (offer := self.find(held.offer_id)) is None:
            return event.may_come
        elif not is_right(held.secret, offer.secret):
            return False
        elif offer.is_over:
            return offer.ended_by in OUTLIVED
        if not offer.is_held:
            offer.history.note(at.now, event, offer.state, ())
        is_kept = offer.hold(keep_s, at)
        self.deadlines.set(offer.key, offer.due_at)
        return is_kept

    def _keep_name(self, name: str, now: float, keep_s: float, tenant: Tenant) -> bool:
        if name in self._used_names:
            return self._used_names[name].code in OUTLIVED
        self._kept_names.keep(name, now, keep_s, tenant)
        return True

    def _open(self, event: ev.Opened, now: float) -> Commands:
        offer = self._admit(event)
        commands = self._apply(offer, event, now)
        kept_s = self._kept_names.pop(offer.transfer_id, now)
        if kept_s > 0 and not offer.is_over:
            offer.hold(kept_s, Context(now, self.limits))
            self.deadlines.set(offer.key, offer.due_at)
        return commands

    def _names_of(self, entry: OfferEntry) -> tuple[str, ...]:
        return tuple(filter(None, (entry.request_id, entry.transfer_id)))

    def _handle(self, event: ev.Event, now: float) -> Commands:
        of_table: dict[type[Any], Callable[[Any, float], Commands]] = {
            ev.Restored: self._restore,
            ev.Copied: self._park,
            ev.KeepRequested: self._keep,
        }
        if type(event) in of_table:
            return of_table[type(event)](event, now)
        if not isinstance(event, ev.RequestReceived | ev.Opened):
            return self._apply_all(self._hit_by(event, now), event, now)
        try:
            if isinstance(event, ev.Opened):
                return self._open(event, now)
            return self._answer(event, now)
        except KVBusError as error:
            return [Refuse(event.reply_to, error)]

    def _answer(self, event: ev.RequestReceived[Any], now: float) -> Commands:
        if isinstance(event.message, AwaitOffer | Decline):
            return self._answer_by_name(event, event.message, now)
        if isinstance(event.message, CommitQuery):
            return self._answer_committed(event, now)
        offer = self._known(event.message.offer_id)
        offer.check_right(event)
        return self._apply(offer, event, now)

    # An event that may end an offer, or give it to a reader, first closes its cell
    # (`kvbus.protocol.commit_cell`). If the reader or the engine was faster, the event finds a
    # released offer.
    def _apply(self, entry: OfferEntry, event: Any, now: float) -> Commands:
        cell, kind = entry.cell, type(getattr(event, "message", event))
        if cell is None or cell.is_closed or kind in KEEPING:
            return super()._apply(entry, event, now)
        if (code := cell.close()) is None:
            return super()._apply(entry, event, now)
        is_committed = code is ErrorCode.OFFER_COMPLETED
        ended = ev.CellCommitted(entry.offer_id) if is_committed else EngineLost(entry.engine_id)
        commands = super()._apply(entry, ended, now)
        if not isinstance(event, ev.RequestReceived):
            return commands
        try:
            return commands + super()._apply(entry, event, now)
        except KVBusError as error:
            return [*commands, Refuse(event.reply_to, error)]

    def _park(self, event: ev.Copied, now: float) -> Commands:
        """Park the offer, or free the pool's blocks if it was read or has ended meanwhile."""
        offer, commands = self.live.get(event.offer_id), list[ev.Command]()
        if offer is not None and offer.may_be_parked:
            commands = self._apply(offer, event, now)
            if offer.pooled is event.pooled:
                self._release_request(offer)
                self._parked[offer.offer_id] = offer
                return commands
        return [*commands, ev.FreePooled(event.pooled)]

    def _hit_by(self, event: ev.Event, now: float) -> list[OfferEntry]:
        live, hit = self.live.values(), list[OfferEntry]()
        match event:
            case ev.Abandoned(transfer_id) if transfer_id in self._named:
                hit = [self._named[transfer_id]]
            case ev.CellCommitted(offer_id, token) if offer_id in self.live:
                cell = self.live[offer_id].cell
                hit = [self.live[offer_id]] if cell and cell.is_committed_by(token) else []
            case ev.CellsChecked():
                hit = [one for one in live if one.cell and one.cell.is_committed]
            case EngineLost(engine_id) | ev.CellsRevoked(engine_id):
                hit = [one for one in live if one.memory_engine_id == engine_id]
            case ev.EngineReady():
                self._engines_awaited_until = None
            case ev.EnginesGone() if self._engines_awaited_until is None:
                self._engines_awaited_until = now + self.limits.engine_grace_s
                hit = self._awaited()
            case DrainStarted() | Stopped():
                self.draining = True
                hit = self._awaited() if isinstance(event, DrainStarted) else [*live]
        return hit

    def _admit(self, event: ev.Opened) -> OfferEntry:
        ticket, name = event.ticket, event.message.transfer_id or ""
        request = ticket.engine_id, ticket.request_id
        if (known := self.find(ticket.offer_id)) is not None:
            theirs = ticket.engine_id, ticket.request_id, ticket.secret
            if (known.engine_id, known.request_id, known.secret) != theirs:
                raise LocalError("another offer has this offer_id", code=ErrorCode.OFFER_EXISTS)
            if known.ended_by not in OUTLIVED:
                return known
            self._remove(known.offer_id)
            self._used_names.pop(name, None)
        offer, used = self._named.get(name), self._used_names.get(name)
        if self.draining:
            raise draining()
        if used is not None and used.code is ErrorCode.CANCELLED:
            raise declined()
        if used is not None or (offer is not None and offer.state is not OfferState.AWAITED):
            raise LocalError(
                "an offer with this transfer_id was made before", code=ErrorCode.OFFER_EXISTS
            )
        if request in self._offer_id_by_request:
            raise LocalError(
                f"request '{ticket.request_id}' is already offered",
                code=ErrorCode.OFFER_EXISTS,
                offer_id=self._offer_id_by_request[request],
            )
        is_again = event.message.left_s is not None  # another agent of this size had them all
        if self.num_offers >= self.limits.max_offers * (2 if is_again else 1):
            raise LocalError(
                f"{self.num_offers} offers are live, which is the limit",
                code=ErrorCode.BUSY,
                max_offers=self.limits.max_offers,
            )
        self._offer_id_by_request[request] = ticket.offer_id
        return self._enter_as(ticket.offer_id, name)

    def _restore(self, event: ev.Restored, now: float) -> Commands:
        offer_id, name = event.ended.offer_id, event.ended.transfer_id or ""
        if self.find(offer_id) is not None:
            return []
        return self._apply(self._enter_as(offer_id, name), event, now)

    def _answer_by_name(
        self, event: ev.RequestReceived[Any], message: AwaitOffer | Decline, now: float
    ) -> Commands:
        name = message.transfer_id
        offer, used = self._named.get(name), self._used_names.get(name)
        if isinstance(message, Decline):
            if used is not None:
                return [done(event)]
        elif used is not None:
            error = LocalError("the offer is over", code=used.code)
            raise declined() if used.code is ErrorCode.CANCELLED else error
        elif offer is None or offer.state is OfferState.AWAITED:
            if offer is None and self.draining:
                raise draining()
            event = self._within_grace(event, message, now)
        return self._apply(offer or self._enter(OfferEntry(event.fresh, name)), event, now)

    # After the last engine is lost, readers should compute locally without delay. But the engine
    # may only reconnect, as after a restart of its agent, which takes a moment.
    #
    #     engine  ready ──┤ gone                  grace ends
    #     await     └─────┴▶ engine_lost              │
    #     await               └───────────────────────┴▶ busy: the reader retries
    #     await                                            └▶ engine_not_ready, if none is ready
    def _within_grace(
        self, event: ev.RequestReceived[Any], message: AwaitOffer, now: float
    ) -> ev.RequestReceived[Any]:
        until = self._engines_awaited_until
        if until is None:
            return event
        if until <= now:
            raise LocalError(
                "no engine of this prefill agent is ready to make the offer",
                code=ErrorCode.ENGINE_NOT_READY,
            )
        return replace(event, message=replace(message, wait_s=min(message.wait_s, until - now)))

    def _awaited(self) -> list[OfferEntry]:
        return [one for one in self._named.values() if one.state is OfferState.AWAITED]

    def _enter(self, offer: OfferEntry) -> OfferEntry:
        self.live[offer.offer_id] = offer
        if offer.transfer_id:
            self._named[offer.transfer_id] = offer
        return offer

    def _enter_as(self, offer_id: str, name: str) -> OfferEntry:
        offer = self._named.get(name)
        if offer is None or offer.state is not OfferState.AWAITED:
            return self._enter(OfferEntry(offer_id, name))
        del self.live[offer.offer_id]  # under a temporary id
        self.deadlines.set(offer.offer_id, None)
        offer.offer_id = offer_id
        return self._enter(offer)

    def _known(self, offer_id: str) -> OfferEntry:
        offer = self.find(offer_id)
        if offer is None or offer.state is OfferState.AWAITED:
            raise LocalError(
                f"no offer '{offer_id}'", code=ErrorCode.OFFER_UNKNOWN, offer_id=offer_id
            )
        return offer

    def _release_request(self, offer: OfferEntry) -> None:
        request = offer.engine_id, offer.request_id
        if self._offer_id_by_request.get(request) == offer.offer_id:
            del self._offer_id_by_request[request]

    def _retire(self, offer: OfferEntry) -> None:
        """Retire an offer; drop one that was never made, but keep a declined name."""
        name = offer.transfer_id
        self._named.pop(name, None)
        if offer.outcome is None:
            del self.live[offer.offer_id]
        else:
            self._release_request(offer)
            self._parked.pop(offer.offer_id, None)
            super()._retire(offer)
        if not name or offer.ended_by is ErrorCode.OFFER_UNKNOWN:
            return
        names, now = self._used_names, offer.history.steps[-1][0]
        names[name] = UsedName(now, offer.ended_by)
        while (
            len(names) > self.limits.max_names
            or next(iter(names.values())).used_at < now - NAMES_KEPT_S
        ):
            names.popitem(last=False)
