"""Which event does what to an offer in which state: the table, and its handlers.

A handler refuses by raising `LocalError` before anything has changed but how long the offer waits;
`OfferTable` turns that into a reply. It returns the commands for the agent, in order.
"""

from collections.abc import Mapping
from typing import Any

from kvbus.errors import ErrorCode, LocalError, TooEarly
from kvbus.protocol.engine import (
    ExtendOffer,
    MakeOffer,
    OfferMade,
    Outcome,
    SealOffer,
    WithdrawOffer,
)
from kvbus.protocol.events import LeaseEvent
from kvbus.protocol.message import Empty
from kvbus.protocol.peer import Claim, Forgo, Meet, Met, PeerWithdraw, Release, Renew, Take
from kvbus.table import Transition
from kvbus.table.events import (
    DeadlinePassed,
    DrainStarted,
    EngineLost,
    Refuse,
    SendReply,
    Stopped,
)
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import Context, Lease, OfferEntry, OfferState

AWAITED, OPEN = OfferState.AWAITED, OfferState.OPEN
SEALED, RELEASED = OfferState.SEALED, OfferState.RELEASED

Commands = list[ev.Command]


def done(event: ev.Asked[Any]) -> SendReply:
    """The answer that says no more than ok."""
    return SendReply(event.reply_to, Empty())


# Before the offer is made: its readers wait for it by name.


def wait(offer: OfferEntry, event: ev.Asked[Meet], at: Context) -> Commands:
    """There is no offer yet: the answer comes with it."""
    if len(offer.waiting) >= at.limits.max_waiting:
        raise LocalError(
            f"{len(offer.waiting)} readers wait for this offer, which is the limit",
            code=ErrorCode.BUSY,
        )
    offer.waiting.append((at.now + min(event.message.wait_s, at.limits.max_wait_s), event.reply_to))
    return []


def end_waits(offer: OfferEntry, _event: DeadlinePassed, at: Context) -> Commands:
    """Some have waited long enough."""
    early = TooEarly(
        "the prefill engine has not made this offer yet", retry_after_s=at.limits.early_retry_s
    )
    over = [reply_to for until, reply_to in offer.waiting if until <= at.now]
    _keep_waiting(offer, [one for one in offer.waiting if one[0] > at.now])
    return [Refuse(reply_to, early) for reply_to in over]


def leave(offer: OfferEntry, event: ev.Abandoned, _: Context) -> Commands:
    """One waits no longer."""
    _keep_waiting(offer, [one for one in offer.waiting if one[1] is not event.reply_to])
    return []


def turn_away(offer: OfferEntry, event: ev.Event, _: Context) -> Commands:
    """Nobody here can make the offer any more, or the reader gave it up for all."""
    waiting = offer.waiting
    _keep_waiting(offer, [])
    match event:
        case ev.EnginesGone():
            error = LocalError("the prefill engine is gone", code=ErrorCode.ENGINE_LOST)
        case ev.Asked():
            offer.ended_by, error = ErrorCode.CANCELLED, given_up()
        case _:
            error = draining()
    refused: Commands = [Refuse(reply_to, error) for _, reply_to in waiting]
    return [*refused, done(event)] if isinstance(event, ev.Asked) else refused


def make(offer: OfferEntry, event: ev.Opened, at: Context) -> Commands:
    """The engine has made it: all that wait are given the ticket."""
    message = event.message
    offer.state = SEALED if message.sealed else OPEN
    offer.engine_id, offer.request_id = event.engine_id, message.request_id
    offer.secret, offer.ticket, offer.ttl_s = event.secret, event.ticket, event.ttl_s
    offer.readers, offer.asked_s = message.readers, message.asked_s
    offer.traceparent = event.ticket.get("traceparent", "")
    offer.num_tokens, offer.tables = message.num_tokens, dict(message.tables)
    offer.opened_at, offer.expires_at = at.now, at.now + event.ttl_s
    waiting, offer.waiting = offer.waiting, []
    made = OfferMade(event.offer_id, dict(event.ticket), event.ticket_blocks)
    return [
        SendReply(event.reply_to, made),
        *(SendReply(reply_to, Met(dict(event.ticket))) for _, reply_to in waiting),
        offer.published("offer.opened"),
    ]


def tell(offer: OfferEntry, event: ev.Asked[Any], _: Context) -> Commands:
    """It was made before its reader asked."""
    return [SendReply(event.reply_to, Met(dict(offer.ticket)))]


def draining() -> LocalError:
    """Why no offer is made here."""
    return LocalError("the prefill agent is draining", code=ErrorCode.DRAINING)


def given_up() -> LocalError:
    """Why an offer of this name is neither made nor waited for."""
    return LocalError("the reader of this offer has given it up", code=ErrorCode.CANCELLED)


def _keep_waiting(offer: OfferEntry, waiting: list[tuple[float, object]]) -> None:
    """An offer that was not made is nothing once nobody waits for it."""
    offer.waiting = waiting
    if not waiting:
        offer.state = RELEASED


# While it lives: the engine adds to it or ends it.


def extend(offer: OfferEntry, event: ev.Asked[ExtendOffer], at: Context) -> Commands:
    """More blocks and tokens; the time to live starts again."""
    more = event.message
    if more.num_tokens < offer.num_tokens:
        raise LocalError(
            f"offer has {offer.num_tokens} tokens, an extension cannot leave {more.num_tokens}"
        )
    offer.tables = offer.tables_with(more.tables)
    offer.num_tokens = more.num_tokens
    offer.wait_until(at.now + offer.ttl_s)
    return [done(event), offer.published("offer.extended")]


def seal(offer: OfferEntry, event: ev.Asked[SealOffer], at: Context) -> Commands:
    """Nothing will be added; the time to live starts again."""
    offer.state = SEALED
    offer.wait_until(at.now + offer.ttl_s)
    return [done(event), offer.published("offer.sealed")]


def withdraw(offer: OfferEntry, event: ev.Asked[Any], _: Context) -> Commands:
    """The request was aborted: revoke the leases, so that their readers fail, and release."""
    return [done(event), *offer.release(Outcome.WITHDRAWN, ErrorCode.OFFER_WITHDRAWN)]


def end_with_engine(offer: OfferEntry, _event: EngineLost, _: Context) -> Commands:
    """The engine is gone, and what it offered with it."""
    return offer.release(Outcome.WITHDRAWN, ErrorCode.ENGINE_LOST)


def end_with_agent(offer: OfferEntry, _event: Stopped, _: Context) -> Commands:
    """The agent ends: its readers are told before it is gone."""
    return offer.release(Outcome.WITHDRAWN, ErrorCode.DRAINING)


def expire(offer: OfferEntry, _event: DeadlinePassed, at: Context) -> Commands:
    """End the leases that were not renewed, then an offer that nobody has read in time.

    One that some, but not all, of its readers have taken is completed: nobody else came.
    """
    commands: Commands = []
    for lease in offer.live_leases:
        if lease.expires_at <= at.now:
            commands += offer.end_lease(lease, "expired", ErrorCode.LEASE_EXPIRED)
    if not offer.live_leases and offer.expires_at <= at.now:
        outcome = Outcome.COMPLETED if offer.num_done else Outcome.EXPIRED
        commands += offer.release(outcome, ErrorCode.OFFER_EXPIRED)
    return commands


# Leases.


def claim(offer: OfferEntry, event: ev.Asked[Claim], at: Context) -> Commands:
    """Grant a lease under a new epoch; a reader may claim again, one too many has to wait.

    A reader that claims again does not hold the offer longer than by renewing. The leases of an
    earlier process of its agent end: nobody is there to give them back.
    """
    message = event.message
    own, outlived = _leases_of(offer, event.message, event.holder)
    _check_room(offer, message, [*own, *outlived], at)
    held_until = min([at.now + at.limits.max_hold_s, *(lease.held_until for lease in own)])
    revoked: Commands = []
    for lease in (*outlived, *own):
        revoked += offer.end_lease(lease, "revoked")
    lease = _lease(
        offer, message, event.holder, token=event.fresh, expires_at=at.now, held_until=held_until
    )
    offer.add_lease(lease)
    return [
        *revoked,
        SendReply(event.reply_to, offer.grant(lease, message.lease_s, {}, at)),
        ev.BeginLease(offer.offer_id, offer.epoch),
        ev.Publish("lease.granted", LeaseEvent(offer_id=offer.offer_id, epoch=offer.epoch)),
    ]


def renew(offer: OfferEntry, event: ev.Asked[Renew], at: Context) -> Commands:
    """More time under the same epoch, and what was added since."""
    message = event.message
    lease = offer.live_lease(message.epoch)
    granted = offer.grant(lease, message.lease_s, message.known_blocks, at)
    return [SendReply(event.reply_to, granted)]


def give_back(offer: OfferEntry, event: ev.Asked[Release], _: Context) -> Commands:
    """The reader gave up; the offer waits for another one."""
    lease = offer.live_lease(event.message.epoch)
    return [done(event), *offer.end_lease(lease, "ended")]


def _leases_of(
    offer: OfferEntry, message: Claim | Take, holder: str
) -> tuple[list[Lease], list[Lease]]:
    """The live leases that this reader has, and those of an earlier process of its agent."""
    live = offer.live_leases
    outlived = [one for one in live if one.is_outlived_by(message, holder)]
    own = [
        one
        for one in live
        if one not in outlived
        and one.reader_id == message.reader_id
        and (isinstance(message, Claim) or one.holder == holder)
    ]
    return own, outlived


def _lease(
    offer: OfferEntry,
    message: Claim | Take,
    holder: str,
    *,
    token: str,
    expires_at: float,
    held_until: float,
) -> Lease:
    return Lease(
        epoch=offer.epoch + 1,
        reader_id=message.reader_id,
        token=token,
        holder=holder,
        reader_agent=message.reader_agent,
        reader_boot=message.reader_boot,
        expires_at=expires_at,
        held_until=held_until,
        is_part=message.part,
    )


# An engine at several agents is one reader of an offer, and each of its agents has a lease:
#
#     home    claim ─▶ lease ──────── reads ─────────────── all parts have ended ─▶ take: ends it
#     part            └▶ claim ─▶ lease ── reads ── take ──▶┘
#
# Only the home's counts. The others keep the offer while they live, as any lease does, and their
# takes say that what they have read is good. The home takes last, so no part is cut short by that.
def _check_room(offer: OfferEntry, message: Claim | Take, ending: list[Lease], at: Context) -> None:
    """Raise `LocalError` (``busy``) when as many read or have read as may, but for ``ending``.

    The reader of a lease may give it back at any time, or keep it to its end.
    """
    if message.part:
        parts = [one for one in offer.leases.values() if one.is_part and one not in ending]
        if sum(one.end is None or one.is_done for one in parts) >= at.limits.max_parts:
            raise LocalError("the offer has too many parts", code=ErrorCode.BUSY)
        return
    others = [one for one in offer.live_leases if one not in ending and not one.is_part]
    if len(others) + offer.num_done < offer.readers:
        return
    ends_in_s = min(lease.expires_at for lease in others) - at.now
    raise LocalError(
        "another reader has the lease",
        code=ErrorCode.BUSY,
        retry_after_s=min(ends_in_s, at.limits.busy_retry_s),
    )


# Taking: a reader asks whether what it has read is good. Why a yes is right:
#
#     engine  last write                                      ▶ released, blocks written again
#     offer       │      sealed ────────────────────────────────▶┘
#                 └ ticket    READ of its tables   take: yes ──▶┘
#     reader          └────────▶├──────────────┤──▶┘
#
# The engine names the blocks in a ticket, or the agent in a grant, when they are written for the
# last time, and the seal says that all are; which of the two comes first does not matter. It is
# written to them again after the release. A yes needs the seal, and the take comes after the last
# byte: whatever was read while the offer is live when the take comes was read in between. A lease
# keeps the offer from its expiry meanwhile, and other readers away; it adds nothing to the bytes.
# The tables that a ticket named are compared: what else was read, out of a ticket that was altered,
# is no KV of this offer. Those that a grant named are the offer's own: its reader leaves them out.
def take(offer: OfferEntry, event: ev.Asked[Take], at: Context) -> Commands:
    """The reader has everything; the last of the readers ends the offer, and no part does."""
    if _has_taken(offer, event):
        return [done(event)]
    message = event.message
    own, outlived = _leases_of(offer, event.message, event.holder)
    ending = [*own, *outlived]
    if message.tables is None and not own:
        raise _without_lease(offer, event)
    _check_room(offer, message, ending, at)
    if message.tables is not None and offer.tables != message.tables:
        raise LocalError(
            "the blocks that were read are not those of the offer: was the ticket altered?",
            code=ErrorCode.GEOMETRY,
            offer_id=offer.offer_id,
        )
    ended: Commands = []
    for lease in ending:
        ended += offer.end_lease(lease, "ended", ErrorCode.OFFER_COMPLETED)
    # A number of its own: what is said of the lease before, maybe another reader's, is stale.
    taken = _lease(
        offer, message, event.holder, token=message.token, expires_at=at.now, held_until=at.now
    )
    taken.end, taken.is_done = ErrorCode.OFFER_COMPLETED, True
    offer.add_lease(taken)
    offer.num_done += not message.part
    if offer.num_done == offer.readers:
        ended += offer.release(Outcome.COMPLETED, ErrorCode.OFFER_COMPLETED)
    return [done(event), *ended]


def _without_lease(offer: OfferEntry, event: ev.Asked[Take]) -> LocalError:
    """Why a reader must show what it has read: its lease is over, or there was none."""
    who = event.message.reader_id, event.holder
    mine = [one.end for one in offer.leases.values() if (one.reader_id, one.holder) == who]
    return LocalError(
        "the reader has no live lease, so it must say which blocks it has read",
        code=(mine and mine[-1]) or ErrorCode.STALE,
        offer_id=offer.offer_id,
    )


def _has_taken(offer: OfferEntry, event: ev.Asked[Take]) -> bool:
    """Whether it was told so already, and only the reply was lost."""
    right = event.message.token, event.holder
    return any(one.is_done and (one.token, one.holder) == right for one in offer.leases.values())


def refuse_early_take(offer: OfferEntry, _event: ev.Asked[Take], at: Context) -> Commands:
    """The seal is on its way, if the ticket is right; the reader asks again.

    Meanwhile it keeps the offer as a lease would, as the engine may be slow: for `max_lease_s`
    from each time that it asks, and for `max_hold_s` from the first.
    """
    if offer.hold_ends_at is None:
        offer.hold_ends_at = at.now + at.limits.max_hold_s
    offer.wait_until(min(at.now + at.limits.max_lease_s, offer.hold_ends_at))
    raise LocalError("the offer is not sealed yet", code=ErrorCode.OFFER_OPEN)


# After it has ended.


def take_again(offer: OfferEntry, event: ev.Asked[Take], _: Context) -> Commands:
    """The reply to the reader's take was lost: say it again, to nobody else."""
    if not _has_taken(offer, event):
        raise ended(offer)
    return [done(event)]


def refuse_sealed(offer: OfferEntry, _event: ev.Asked[Any], _: Context) -> Commands:
    """A sealed offer does not change."""
    raise LocalError("the offer is sealed", code=ErrorCode.OFFER_SEALED, offer_id=offer.offer_id)


def refuse_ended(offer: OfferEntry, _event: ev.Asked[Any], _: Context) -> Commands:
    """Says what became of the offer."""
    raise ended(offer)


def refuse_late(offer: OfferEntry, event: ev.Asked[Renew | Release], _: Context) -> Commands:
    """No lease of an ended offer is live: say how it ended."""
    offer.live_lease(event.message.epoch)
    return []


def withdraw_again(_offer: OfferEntry, event: ev.Asked[Any], _: Context) -> Commands:
    """It is over already, which is what the sender wanted."""
    return [done(event)]


def ended(offer: OfferEntry) -> LocalError:
    """What became of an offer that is over."""
    return LocalError(
        f"the offer is over: {offer.ended_by}", code=offer.ended_by, offer_id=offer.offer_id
    )


def _table() -> dict[tuple[OfferState, type[Any]], Transition[OfferState]]:
    rows: dict[tuple[OfferState, type[Any]], Transition[OfferState]] = {
        (AWAITED, Meet): Transition(wait, (AWAITED,)),
        (AWAITED, ev.Abandoned): Transition(leave, (AWAITED, RELEASED)),
        (AWAITED, DeadlinePassed): Transition(end_waits, (AWAITED, RELEASED)),
        (AWAITED, MakeOffer): Transition(make, (OPEN, SEALED)),
        (OPEN, ExtendOffer): Transition(extend, (OPEN,)),
        (OPEN, SealOffer): Transition(seal, (SEALED,)),
        (OPEN, Take): Transition(refuse_early_take, (OPEN,)),
        (SEALED, ExtendOffer): Transition(refuse_sealed, (SEALED,)),
        (SEALED, SealOffer): Transition(refuse_sealed, (SEALED,)),
        (SEALED, Take): Transition(take, (SEALED, RELEASED)),
        (RELEASED, Take): Transition(take_again, (RELEASED,)),
    }
    kind: type[Any]
    for kind in (Forgo, ev.EnginesGone, DrainStarted, Stopped):
        rows[AWAITED, kind] = Transition(turn_away, (RELEASED,))
    for state in (OPEN, SEALED):
        rows[state, Meet] = Transition(tell, (state,))
        rows[state, Claim] = Transition(claim, (state,))
        rows[state, Renew] = Transition(renew, (state,))
        rows[state, Release] = Transition(give_back, (state,))
        rows[state, ev.Abandoned] = Transition(lambda *_: [], (state,))
        rows[state, EngineLost] = Transition(end_with_engine, (RELEASED,))
        rows[state, Stopped] = Transition(end_with_agent, (RELEASED,))
        rows[state, DeadlinePassed] = Transition(expire, (state, RELEASED))
        for kind in (WithdrawOffer, PeerWithdraw, Forgo):
            rows[state, kind] = Transition(withdraw, (RELEASED,))
    for kind in (ExtendOffer, SealOffer, Claim):
        rows[RELEASED, kind] = Transition(refuse_ended, (RELEASED,))
    for kind in (Renew, Release):
        rows[RELEASED, kind] = Transition(refuse_late, (RELEASED,))
    for kind in (WithdrawOffer, PeerWithdraw):
        rows[RELEASED, kind] = Transition(withdraw_again, (RELEASED,))
    return rows


TRANSITIONS: Mapping[tuple[OfferState, type[Any]], Transition[OfferState]] = _table()
