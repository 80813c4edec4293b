"""Transitions of offers: the handler of each event in each state.

A handler refuses by raising `LocalError`, before it changes more than ``expires_at``.
"""

from typing import Any

from kvbus.errors import ErrorCode, LocalError, TooEarly
from kvbus.protocol.engine import (
    ExtendOffer,
    MakeOffer,
    OfferMade,
    Outcome,
    Park,
    ParkOffer,
    SealOffer,
    WithdrawOffer,
)
from kvbus.protocol.message import Empty
from kvbus.protocol.peer import (
    Acquire,
    AwaitedOffer,
    AwaitOffer,
    Commit,
    Decline,
    PeerWithdraw,
    Release,
    Renew,
)
from kvbus.table.events import (
    DeadlinePassed,
    DrainStarted,
    EngineLost,
    Refuse,
    SendReply,
    Stopped,
)
from kvbus.table.table import transitions
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import Context, Lease, OfferEntry, OfferState
from kvbus_prefill.offer.events import Commands

AWAITED, OPEN = OfferState.AWAITED, OfferState.OPEN
SEALED, PARKED, RELEASED = OfferState.SEALED, OfferState.PARKED, OfferState.RELEASED


def done(event: ev.RequestReceived[Any]) -> SendReply:
    return SendReply(event.reply_to, Empty())


def draining() -> LocalError:
    return LocalError("the prefill agent is draining", code=ErrorCode.DRAINING)


def declined() -> LocalError:
    return LocalError("the reader of this offer has given it up", code=ErrorCode.CANCELLED)


def ended(offer: OfferEntry) -> LocalError:
    return LocalError(
        f"the offer is over: {offer.ended_by}", code=offer.ended_by, offer_id=offer.offer_id
    )


# Before the offer is made: readers wait for it by name. Without readers, the entry is removed.


def wait(offer: OfferEntry, event: ev.RequestReceived[AwaitOffer], at: Context) -> Commands:
    offer.waiting[event.reply_to] = at.now + min(event.message.wait_s, at.limits.max_wait_s)
    return []


def end_waits(offer: OfferEntry, _event: DeadlinePassed, at: Context) -> Commands:
    early = TooEarly(
        "the prefill engine has not made this offer yet", retry_after_s=at.limits.early_retry_s
    )
    over = [reply_to for reply_to, until in offer.waiting.items() if until <= at.now]
    for reply_to in over:
        _stop_waiting(offer, reply_to)
    return [Refuse(reply_to, early) for reply_to in over]


def stop_waiting(offer: OfferEntry, event: ev.Abandoned, _: Context) -> Commands:
    _stop_waiting(offer, event.reply_to)
    return []


def turn_away(offer: OfferEntry, event: ev.Event, _: Context) -> Commands:
    offer.state, error = RELEASED, draining()
    if isinstance(event, ev.EnginesGone):
        error = LocalError("the prefill engine is gone", code=ErrorCode.ENGINE_LOST)
    return [Refuse(reply_to, error) for reply_to in offer.waiting]


def decline(offer: OfferEntry, event: ev.RequestReceived[Decline], _: Context) -> Commands:
    offer.state, offer.ended_by = RELEASED, ErrorCode.CANCELLED
    return [*(Refuse(reply_to, declined()) for reply_to in offer.waiting), done(event)]


def make(offer: OfferEntry, event: ev.Opened, at: Context) -> Commands:
    message, ticket = event.message, event.ticket
    offer.state = SEALED if message.sealed else OPEN
    offer.engine_id, offer.request_id = ticket.engine_id, ticket.request_id
    offer.secret, offer.ticket, offer.ttl_s = ticket.secret, ticket, event.ttl_s
    offer.readers, offer.sent_s, offer.park = message.readers, message.sent_s, message.park
    offer.traceparent, offer.cell = ticket.traceparent, event.cell
    if offer.cell is not None:
        offer.cell.open(message.cell)
    offer.num_tokens, offer.tables = message.num_tokens, dict(message.tables)
    offer.note_work(message.after)
    left_s = event.ttl_s
    if message.left_s is not None:
        left_s = max(message.left_s, at.limits.reader_return_s)
    offer.opened_at, offer.expires_at, offer.sealed_at = at.now, at.now + left_s, at.now
    waiting, offer.waiting = offer.waiting, {}
    fields = ticket.to_json()
    return [
        made(event),
        *(SendReply(reply_to, AwaitedOffer(fields)) for reply_to in waiting),
        offer.published("offer.opened"),
    ]


def made(event: ev.Opened) -> SendReply:
    ticket = event.ticket
    body = OfferMade(ticket.offer_id, ticket.to_json(), event.ticket_blocks, event.ttl_s)
    return SendReply(event.reply_to, body)


def make_again(_offer: OfferEntry, event: ev.Opened, _: Context) -> Commands:
    return [made(event)]


def report_again(offer: OfferEntry, event: ev.Opened, _: Context) -> Commands:
    """Repeat a lost report of the end."""
    return [made(event), offer.report()]


def restore(offer: OfferEntry, event: ev.Restored, _: Context) -> Commands:
    """Restore an offer of an earlier agent process, to answer repeated requests."""
    known = event.ended
    offer.state, offer.engine_id, offer.request_id = RELEASED, event.engine_id, known.request_id
    offer.secret, offer.committed = known.secret, known.commits
    offer.num_tokens = known.num_tokens
    offer.outcome, offer.ended_by = Outcome.COMPLETED, ErrorCode.OFFER_COMPLETED
    return [Refuse(reply_to, ended(offer)) for reply_to in offer.waiting]


def repeat_reply(offer: OfferEntry, event: ev.RequestReceived[Any], _: Context) -> Commands:
    return (
        []
        if offer.ticket is None
        else [SendReply(event.reply_to, AwaitedOffer(offer.ticket.to_json()))]
    )


def ignore(_offer: OfferEntry, _event: ev.Event, _: Context) -> Commands:
    """Readers have their tickets, or use requests after their cell is closed."""
    return []


def _stop_waiting(offer: OfferEntry, reply_to: object) -> None:
    offer.waiting.pop(reply_to, None)
    if not offer.waiting:
        offer.state = RELEASED


# Changes by the engine.


def extend(offer: OfferEntry, event: ev.RequestReceived[ExtendOffer], at: Context) -> Commands:
    message = event.message
    if message.num_tokens < offer.num_tokens:
        raise LocalError(
            f"offer has {offer.num_tokens} tokens, an extension cannot leave {message.num_tokens}"
        )
    offer.note_work(message.after)
    offer.tables = offer.tables_with(message.tables)
    offer.num_tokens = message.num_tokens
    offer.wait_until(at.now + offer.ttl_s)
    return [done(event), offer.published("offer.extended")]


def seal(offer: OfferEntry, event: ev.RequestReceived[SealOffer], at: Context) -> Commands:
    offer.note_work(event.message.after)
    offer.state, offer.sealed_at = SEALED, at.now
    offer.wait_until(at.now + offer.ttl_s)
    return [done(event), offer.published("offer.sealed")]


def want_park(offer: OfferEntry, event: ev.RequestReceived[ParkOffer], _: Context) -> Commands:
    offer.park = Park.ALWAYS
    return [done(event), ev.ParkSoon(offer.offer_id)]


# Why the bytes of a parked offer are right, and its blocks free:
#
#     engine  last write, sealed                        released: parked ─▶ blocks written again
#     agent     offer └▶ sealed   copy ──────┤ last byte ─▶ parked
#     reader         before: READ ─────────────────── acquire, commit: refused, read from the pool
#     reader         after:                                       READ from the pool ─▶ commit: yes
#
# The engine writes to the blocks only after `released`, so the copy has read them unchanged. With a
# live lease, or a commit, the copy is dropped, and nothing has happened. The cell of the engine is
# closed before, so a commit of its bytes comes as a request, which names the engine. The
# engine's blocks may have been written again by then, so only the pool is good. The pool has cells
# of its own: this agent closes the cell of an offer before it writes to the pool's blocks again.
def park(offer: OfferEntry, event: ev.Copied, _: Context) -> Commands:
    pooled = event.pooled
    offer.state, offer.pooled, offer.tables = PARKED, pooled, dict(pooled.tables)
    offer.cell = event.cell
    if offer.cell is not None:
        offer.cell.open(pooled.cell)
    return [offer.report_parked(pooled)]


def report_parked_again(offer: OfferEntry, event: ev.Opened, _: Context) -> Commands:
    """Repeat a lost report to an engine that publishes the offer again."""
    return [made(event), *([offer.report_parked(offer.pooled)] if offer.pooled else [])]


def withdraw(offer: OfferEntry, event: ev.RequestReceived[Any], _: Context) -> Commands:
    return [done(event), *offer.release(Outcome.WITHDRAWN, ErrorCode.OFFER_WITHDRAWN)]


def end_with(offer: OfferEntry, event: EngineLost | Stopped, _: Context) -> Commands:
    """End an offer. If the agent ends, its engine keeps the offer and publishes it again."""
    if isinstance(event, EngineLost):
        return offer.release(Outcome.WITHDRAWN, ErrorCode.ENGINE_LOST)
    return offer.end(Outcome.WITHDRAWN, ErrorCode.DRAINING)


def expire(offer: OfferEntry, _event: DeadlinePassed, at: Context) -> Commands:
    commands: Commands = []
    for lease in offer.live_leases:
        if lease.expires_at <= at.now:
            commands.append(offer.end_lease(lease, "expired", ErrorCode.LEASE_EXPIRED))
    if not offer.live_leases and offer.expires_at <= at.now:
        # After a commit, the other readers never came.
        outcome = Outcome.COMPLETED if offer.num_done else Outcome.EXPIRED
        commands += offer.release(outcome, ErrorCode.OFFER_EXPIRED)
    return commands


def acquire(offer: OfferEntry, event: ev.RequestReceived[Acquire], at: Context) -> Commands:
    """Grant a lease under a new epoch; a repeated request gets no more time than a renewal."""
    engine_id = event.message.engine_id
    offer.check_engine(engine_id)
    if engine_id not in ("", offer.memory_engine_id):  # with a lease, a commit names no engine
        raise LocalError(
            f"the offer's blocks are not those of engine '{engine_id}'", code=ErrorCode.FORBIDDEN
        )
    own, outlived = _leases_of(offer, event)
    _check_room(offer, event.message, [*own, *outlived], at)
    held_until = min([at.now + at.limits.max_hold_s, *(lease.held_until for lease in own)])
    revoked = [offer.end_lease(lease, "revoked") for lease in (*outlived, *own)]
    lease = offer.add_lease(event, event.fresh, at.now, held_until)
    return [
        *revoked,
        SendReply(event.reply_to, offer.grant(lease, event.message, at)),
        ev.BeginLease(offer.offer_id, offer.epoch),
    ]


def renew(offer: OfferEntry, event: ev.RequestReceived[Renew], at: Context) -> Commands:
    lease = offer.live_lease(event.message.epoch)
    return [SendReply(event.reply_to, offer.grant(lease, event.message, at))]


def release(offer: OfferEntry, event: ev.RequestReceived[Release], _: Context) -> Commands:
    lease = offer.live_lease(event.message.epoch)
    return [done(event), offer.end_lease(lease, "ended")]


def _leases_of(
    offer: OfferEntry, event: ev.RequestReceived[Acquire] | ev.RequestReceived[Commit]
) -> tuple[list[Lease], list[Lease]]:
    live, message = offer.live_leases, event.message
    outlived = [one for one in live if one.is_outlived_by(event)]
    own = [
        one
        for one in live
        if one not in outlived
        and one.reader_id == message.reader_id
        and (isinstance(message, Acquire) or one.holder == event.holder)
    ]
    return own, outlived


# An engine at several agents is one reader of an offer, with a lease for each agent:
#
#     home    acquire ─▶ lease ──────── reads ────────────── all parts have ended ─▶ commit: ends it
#     part              └▶ acquire ─▶ lease ─ reads ─ commit ▶┘
#
# Only the home's lease counts as a reader. The others keep the offer alive, as any lease does, and
# their commits confirm their reads. The home commits last, so it never cuts a part short.
def _check_room(
    offer: OfferEntry, message: Acquire | Commit, ending: list[Lease], at: Context
) -> None:
    """Raise `LocalError` (``busy``) if the offer has all its readers without ``ending``."""
    if not offer.leases:
        return
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


# A commit confirms that the read bytes are valid. Proof that a successful commit is right:
#
#     engine  last write                                      ▶ released, blocks written again
#     offer       │      sealed ────────────────────────────────▶┘
#                 └ ticket    READ of its tables  commit: yes ─▶┘
#     reader          └────────▶├──────────────┤──▶┘
#
# A ticket or a grant names a block only after its last write. The seal confirms that all blocks are
# written. The order of the two does not matter. The engine writes to the blocks again only after
# the release. A commit comes after the last byte, and succeeds only if the offer is sealed and
# live. So all bytes were read in between. A lease only delays expiry and keeps other readers away;
# it adds nothing to validity.
#
# The table compares tables from a ticket: bytes from an altered ticket are not KV of this offer.
# Tables from a grant are the offer's own, so the commit omits them.
def commit(offer: OfferEntry, event: ev.RequestReceived[Commit], at: Context) -> Commands:
    """Complete a read. The commit of the last reader ends the offer; a part's commit does not."""
    message, own, outlived = event.message, list[Lease](), list[Lease]()
    if offer.denied.get(message.token, message.reader_boot) != message.reader_boot:
        raise LocalError("a later process of the reader repeats the read", code=ErrorCode.STALE)
    if offer.leases:  # usually none: tables from a ticket are read without one
        if offer.has_committed(message.token, event.holder):
            return [done(event)]
        own, outlived = _leases_of(offer, event)
    if message.tables is None and not own:
        raise _without_lease(offer, event)
    if message.tables is not None:
        offer.check_engine(message.engine_id)
    _check_room(offer, message, [*own, *outlived], at)
    if message.tables is not None:
        _check_read(offer, message)
    completed = ErrorCode.OFFER_COMPLETED
    commands: Commands = [done(event)]
    commands += [offer.end_lease(lease, "ended", completed) for lease in (*own, *outlived)]
    # An epoch of its own: messages about an earlier lease, maybe another reader's, are stale.
    committed = offer.add_lease(event, message.token, at.now, at.now)
    committed.end, committed.is_done = completed, True
    if offer.num_done == offer.readers:
        commands += offer.release(Outcome.COMPLETED, completed)
    return commands


def end_committed(offer: OfferEntry, _event: ev.CellCommitted, _: Context) -> Commands:
    if offer.cell is not None:
        if not offer.cell.is_closed:
            offer.cell.close()
        offer.committed = offer.cell.commits
    return offer.release(Outcome.COMPLETED, ErrorCode.OFFER_COMPLETED)


def _check_read(offer: OfferEntry, message: Commit) -> None:
    read = {
        "block table": (message.tables, offer.tables),
        "number of tokens": (message.num_tokens, offer.num_tokens),
        "engine": (message.engine_id, offer.memory_engine_id),
    }
    other = next((what for what, (theirs, ours) in read.items() if theirs != ours), None)
    if other is not None:
        raise LocalError(
            f"the {other} of what was read is not that of the offer: was the ticket altered?",
            code=ErrorCode.GEOMETRY,
            offer_id=offer.offer_id,
        )


def _without_lease(offer: OfferEntry, event: ev.RequestReceived[Commit]) -> LocalError:
    who = event.message.reader_id, event.holder
    mine = [one.end for one in offer.leases.values() if (one.reader_id, one.holder) == who]
    return LocalError(
        "the reader has no live lease, so it must list the blocks that it has read",
        code=(mine and mine[-1]) or ErrorCode.STALE,
        offer_id=offer.offer_id,
    )


def refuse_early_commit(
    offer: OfferEntry, _event: ev.RequestReceived[Commit], at: Context
) -> Commands:
    """Refuse the commit; each keeps the offer for ``max_lease_s``, and all for ``max_hold_s``."""
    offer.hold(at.limits.max_lease_s, at)
    raise LocalError("the offer is not sealed yet", code=ErrorCode.OFFER_OPEN)


# After the seal, or the release.


def refuse_sealed(offer: OfferEntry, _event: ev.RequestReceived[Any], _: Context) -> Commands:
    raise LocalError("the offer is sealed", code=ErrorCode.OFFER_SEALED, offer_id=offer.offer_id)


def refuse_ended(offer: OfferEntry, event: ev.RequestReceived[Any], _: Context) -> Commands:
    if isinstance(event.message, Renew | Release):
        offer.live_lease(event.message.epoch)
    raise ended(offer)


def commit_again(offer: OfferEntry, event: ev.RequestReceived[Commit], at: Context) -> Commands:
    """Repeat a lost reply, only to the reader that has committed the offer."""
    is_own = offer.has_committed(event.message.token, event.holder)
    return [done(event)] if is_own else refuse_ended(offer, event, at)


def reply_done(_offer: OfferEntry, event: ev.RequestReceived[Any], _: Context) -> Commands:
    return [done(event)]


HELD = (OPEN, SEALED)
"""States in which the blocks are the engine's."""
LIVE = (*HELD, PARKED)
TRANSITIONS = transitions(
    ((AWAITED,), (AwaitOffer,), wait, ()),
    ((AWAITED,), (ev.Abandoned,), stop_waiting, (AWAITED, RELEASED)),
    ((AWAITED,), (DeadlinePassed,), end_waits, (AWAITED, RELEASED)),
    ((AWAITED,), (ev.EnginesGone, DrainStarted, Stopped), turn_away, (RELEASED,)),
    ((AWAITED,), (Decline,), decline, (RELEASED,)),
    ((AWAITED,), (MakeOffer,), make, HELD),
    ((AWAITED,), (ev.Restored,), restore, (RELEASED,)),
    (HELD, (MakeOffer,), make_again, ()),
    ((PARKED,), (MakeOffer,), report_parked_again, ()),
    (LIVE, (AwaitOffer,), repeat_reply, ()),
    (LIVE, (ev.Abandoned,), ignore, ()),
    ((OPEN,), (ExtendOffer,), extend, ()),
    ((OPEN,), (SealOffer,), seal, (SEALED,)),
    ((SEALED, PARKED), (ExtendOffer, SealOffer), refuse_sealed, ()),
    (HELD, (ParkOffer,), want_park, ()),
    ((SEALED,), (ev.Copied,), park, (PARKED,)),
    ((PARKED, RELEASED), (ParkOffer,), reply_done, ()),
    (LIVE, (WithdrawOffer, PeerWithdraw, Decline), withdraw, (RELEASED,)),
    (LIVE, (EngineLost, Stopped), end_with, (RELEASED,)),
    (LIVE, (ev.CellsRevoked, ev.CellsChecked), ignore, ()),
    ((OPEN,), (DeadlinePassed,), expire, (OPEN, RELEASED)),
    ((SEALED,), (DeadlinePassed,), expire, (SEALED, RELEASED)),
    ((PARKED,), (DeadlinePassed,), expire, (PARKED, RELEASED)),
    (LIVE, (Acquire,), acquire, ()),
    (LIVE, (Renew,), renew, ()),
    (LIVE, (Release,), release, ()),
    ((OPEN,), (Commit,), refuse_early_commit, ()),
    ((SEALED,), (Commit,), commit, (SEALED, RELEASED)),
    ((PARKED,), (Commit,), commit, (PARKED, RELEASED)),
    ((SEALED, PARKED), (ev.CellCommitted,), end_committed, (RELEASED,)),
    ((RELEASED,), (Commit,), commit_again, ()),
    ((RELEASED,), (MakeOffer,), report_again, ()),
    ((RELEASED,), (WithdrawOffer, PeerWithdraw, Decline), reply_done, ()),
    ((RELEASED,), (ExtendOffer, SealOffer, Acquire, Renew, Release), refuse_ended, ()),
)
