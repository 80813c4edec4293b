"""Which event does what to an offer in which state: the table, and its handlers.

Refuses by raising `LocalError` before anything has changed but how long the offer waits;
`OfferTable` turns that into a reply.
Every handler returns the commands for the agent, in order.
"""

from collections.abc import Mapping

from kvbus.errors import ErrorCode, LocalError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import Outcome
from kvbus.protocol.events import LeaseEvent
from kvbus.protocol.message import Empty
from kvbus.protocol.peer import Granted
from kvbus.table import Transition
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import Context, Lease, OfferEntry, OfferState

OPEN, SEALED, RELEASED = OfferState.OPEN, OfferState.SEALED, OfferState.RELEASED


Commands = list[ev.Command]


def extend(offer: OfferEntry, event: ev.Extended, at: Context) -> Commands:
    """More blocks and tokens; the time to live starts anew."""
    if event.num_tokens < offer.num_tokens:
        raise LocalError(
            f"offer has {offer.num_tokens} tokens, an extension cannot leave {event.num_tokens}"
        )
    offer.tables |= {
        group: offer.tables[group].extended(more) if group in offer.tables else more
        for group, more in event.tables.items()
    }
    offer.num_tokens = event.num_tokens
    offer.wait_until(at.now + offer.opened.ttl_s)
    return [ev.SendReply(event.reply_to, Empty()), offer.published("offer.extended")]


def seal(offer: OfferEntry, event: ev.Sealed, at: Context) -> Commands:
    """Nothing will be added; the time to live starts anew."""
    offer.state = SEALED
    offer.wait_until(at.now + offer.opened.ttl_s)
    return [ev.SendReply(event.reply_to, Empty()), offer.published("offer.sealed")]


def withdraw(offer: OfferEntry, event: ev.Withdrawn, _: Context) -> Commands:
    """The request was aborted: revoke the lease, so that its reader fails, and release."""
    ended = offer.release(Outcome.WITHDRAWN, ErrorCode.OFFER_WITHDRAWN)
    return [ev.SendReply(event.reply_to, Empty()), *ended]


def end_with_engine(offer: OfferEntry, _event: ev.EngineLost, _: Context) -> Commands:
    """The engine is gone, and what it offered with it."""
    return offer.release(Outcome.WITHDRAWN, ErrorCode.ENGINE_LOST)


def end_with_agent(offer: OfferEntry, _event: ev.Stopped, _: Context) -> Commands:
    """The agent ends: who reads is told before it is gone."""
    return offer.release(Outcome.WITHDRAWN, ErrorCode.DRAINING)


def expire(offer: OfferEntry, _event: ev.DeadlinePassed, at: Context) -> Commands:
    """End the leases that were not renewed, then an offer that nobody has read in time.

    One that some, but not all, of its readers have read is completed: nobody else came.
    """
    commands: Commands = []
    for lease in offer.live_leases:
        if lease.expires_at <= at.now:
            commands += offer.end_lease(lease, "expired", ErrorCode.LEASE_EXPIRED)
    if not offer.live_leases and offer.expires_at <= at.now:
        outcome = Outcome.COMPLETED if offer.num_done else Outcome.EXPIRED
        commands += offer.release(outcome, ErrorCode.OFFER_EXPIRED)
    return commands


def claim(offer: OfferEntry, event: ev.Claimed, at: Context) -> Commands:
    """Grant a lease under a new epoch; a reader may claim again, one too many has to wait.

    Who claims again while it holds a lease does not hold the offer longer than by renewing. The
    leases of an earlier process of the reader's agent end: nobody is there any more to return them.
    """
    outlived, own = _outlived(offer, event), _own(offer, event)
    _check_room(offer, [*outlived, *own], at)
    held_until = min([at.now + at.limits.max_hold_s, *(lease.held_until for lease in own)])
    revoked: Commands = []
    for lease in (*outlived, *own):
        revoked += offer.end_lease(lease, "revoked")
    right = (event.process, event.token, event.holder)
    lease = Lease(offer.epoch + 1, event.reader_id, at.now, held_until, *right)
    offer.add_lease(lease)
    return [
        *revoked,
        ev.SendReply(event.reply_to, _grant(offer, lease, event.lease_s, {}, at)),
        ev.BeginLease(offer.offer_id, offer.epoch),
        ev.Publish("lease.granted", LeaseEvent(offer_id=offer.offer_id, epoch=offer.epoch)),
    ]


# Agents have names, not proofs of them. But who claims shows the ticket's secret, and with that
# could end the offer as well: to end a lease of it by a wrong name is no more. Keys must be equal.
def _outlived(offer: OfferEntry, event: ev.Claimed | ev.Taken) -> list[Lease]:
    """The leases of an earlier process of the agent that asks."""
    live = offer.live_leases
    return [
        one for one in live if event.process.follows(one.process) and event.holder == one.holder
    ]


def _own(offer: OfferEntry, event: ev.Claimed) -> list[Lease]:
    """The lease that the reader has, if it has one."""
    outlived = _outlived(offer, event)
    return [
        one for one in offer.live_leases if one.reader_id == event.reader_id and one not in outlived
    ]


def _check_room(offer: OfferEntry, ending: list[Lease], at: Context) -> None:
    """Raise `LocalError` (``busy``) when as many read or have read as may, but for ``ending``.

    Who has a lease may give it back at any time, or keep it to its end.
    """
    others = [lease for lease in offer.live_leases if lease not in ending]
    if len(others) + offer.num_done < offer.opened.readers:
        return
    ends_in_s = min(lease.expires_at for lease in others) - at.now
    raise LocalError(
        "another reader has the lease",
        code=ErrorCode.BUSY,
        retry_after_s=min(ends_in_s, at.limits.busy_retry_s),
    )


def renew(offer: OfferEntry, event: ev.Renewed, at: Context) -> Commands:
    """More time under the same epoch, and what was added since."""
    lease = offer.live_lease(event.epoch)
    granted = _grant(offer, lease, event.lease_s, event.known_blocks, at)
    return [ev.SendReply(event.reply_to, granted)]


def confirm(offer: OfferEntry, event: ev.Confirmed, _: Context) -> Commands:
    """The reader has everything, under a lease that was live all along."""
    lease = offer.leases.get(event.epoch)
    if lease is not None and lease.is_done:  # the reply was lost
        return [ev.SendReply(event.reply_to, Empty())]
    lease = offer.live_lease(event.epoch)
    lease.is_done = True
    ended = offer.end_lease(lease, "ended", ErrorCode.OFFER_COMPLETED)
    return [ev.SendReply(event.reply_to, Empty()), *ended, *offer.count_reader()]


# Taking: a reader that never had a lease asks whether what it has read is good. Why a yes is right:
#
#     engine  last write                                      ▶ released, blocks written anew
#     offer       │      sealed ────────────────────────────────▶┘
#                 └ ticket    READ of its tables   take: yes ──▶┘
#     reader          └────────▶├──────────────┤──▶┘
#
# The engine names the blocks in a ticket when it has written them for the last time, and says that
# it is done with them by the seal; which of the two comes first does not matter. It writes to them
# again after the release. A yes needs the seal, and the take comes after the last byte: whatever
# was read while the offer is live when the take comes was read in between. A lease keeps the offer
# from its expiry meanwhile, and other readers away; it adds nothing to the bytes. The tables are
# compared: what else was read, out of a ticket that was altered, is no KV of this offer.
def take(offer: OfferEntry, event: ev.Taken, at: Context) -> Commands:
    """Claim and confirm in one step: the reader has everything."""
    if _has_taken(offer, event):
        return [ev.SendReply(event.reply_to, Empty())]
    live, who = offer.live_leases, (event.reader_id, event.holder)
    own = [lease for lease in live if (lease.reader_id, lease.holder) == who]
    ending = own + [lease for lease in _outlived(offer, event) if lease not in own]
    _check_room(offer, ending, at)
    if offer.tables != event.tables:
        raise LocalError(
            "the blocks that were read are not those of the offer: was the ticket altered?",
            code=ErrorCode.GEOMETRY,
            offer_id=offer.offer_id,
        )
    ended: Commands = []
    for lease in ending:
        ended += offer.end_lease(lease, "ended")
    # A number of its own: a confirm of the lease before, maybe another reader's, is stale.
    right = (event.process, event.token, event.holder, ErrorCode.OFFER_COMPLETED)
    done = Lease(offer.epoch + 1, event.reader_id, at.now, at.now, *right, is_done=True)
    offer.add_lease(done)
    return [ev.SendReply(event.reply_to, Empty()), *ended, *offer.count_reader()]


def _has_taken(offer: OfferEntry, event: ev.Taken) -> bool:
    """Whether it was told so already, and only the reply was lost."""
    right = (event.token, event.holder)
    return any(one.is_done and (one.token, one.holder) == right for one in offer.leases.values())


def refuse_early_take(offer: OfferEntry, _event: ev.Taken, at: Context) -> Commands:
    """The seal is on its way, if the ticket is right; the reader asks again.

    Meanwhile it keeps the offer as a lease would, as the engine may be slow: for `max_lease_s`
    from each time that it asks, and for `max_hold_s` from the first.
    """
    if offer.hold_ends_at is None:
        offer.hold_ends_at = at.now + at.limits.max_hold_s
    offer.wait_until(min(at.now + at.limits.max_lease_s, offer.hold_ends_at))
    raise LocalError("the offer is not sealed yet", code=ErrorCode.OFFER_OPEN)


def take_again(offer: OfferEntry, event: ev.Taken, _: Context) -> Commands:
    """The reply to the reader's take was lost: say it again, to nobody else."""
    if not _has_taken(offer, event):
        raise ended(offer)
    return [ev.SendReply(event.reply_to, Empty())]


def refuse_early_confirm(offer: OfferEntry, event: ev.Confirmed, _: Context) -> Commands:
    """The engine still writes, so its blocks cannot be released yet."""
    offer.live_lease(event.epoch)
    raise LocalError("the offer is not sealed yet", code=ErrorCode.OFFER_OPEN)


def give_back(offer: OfferEntry, event: ev.Returned, _: Context) -> Commands:
    """The reader gave up; the offer waits for another one."""
    lease = offer.live_lease(event.epoch)
    return [ev.SendReply(event.reply_to, Empty()), *offer.end_lease(lease, "ended")]


def refuse_sealed(offer: OfferEntry, _event: ev.RequestEvent, _: Context) -> Commands:
    """A sealed offer does not change."""
    raise LocalError("the offer is sealed", code=ErrorCode.OFFER_SEALED, offer_id=offer.offer_id)


def refuse_ended(offer: OfferEntry, _event: ev.RequestEvent, _: Context) -> Commands:
    """Says what became of the offer."""
    raise ended(offer)


def ended(offer: OfferEntry) -> LocalError:
    """What became of an offer that is over."""
    return LocalError(
        f"the offer is over: {offer.ended_by}",
        code=offer.ended_by,
        offer_id=offer.offer_id,
    )


def refuse_late(offer: OfferEntry, event: ev.Renewed | ev.Returned, _: Context) -> Commands:
    """No lease of an ended offer is live: say how it ended."""
    offer.live_lease(event.epoch)
    return []


def confirm_again(offer: OfferEntry, event: ev.Confirmed, _: Context) -> Commands:
    """The reply to a reader's confirm was lost: say it again."""
    lease = offer.leases.get(event.epoch)
    if lease is None or not lease.is_done:
        offer.live_lease(event.epoch)
    return [ev.SendReply(event.reply_to, Empty())]


def withdraw_again(_offer: OfferEntry, event: ev.Withdrawn, _: Context) -> Commands:
    """It is over already, which is what the sender wanted."""
    return [ev.SendReply(event.reply_to, Empty())]


def _grant(
    offer: OfferEntry, lease: Lease, lease_s: float, known_blocks: Mapping[str, int], at: Context
) -> Granted:
    wanted = min(at.now + min(lease_s, at.limits.max_lease_s), lease.held_until)
    lease.expires_at = max(lease.expires_at, wanted)
    return Granted(
        epoch=lease.epoch,
        token=lease.token,
        lease_s=max(lease.expires_at - at.now, 1e-6),
        num_tokens=offer.num_tokens,
        sealed=offer.state is SEALED,
        tables={
            group: _after(table, known_blocks.get(group, 0))
            for group, table in offer.tables.items()
        },
    )


def _after(table: BlockTable, known_blocks: int) -> BlockTable:
    """The part of a table behind the blocks that the reader already knows."""
    skipped = min(known_blocks, len(table))
    return BlockTable(ids=table.ids[4 * skipped :], first_block=table.first_block + skipped)


TRANSITIONS: Mapping[tuple[OfferState, type[ev.Event]], Transition[OfferState]] = {
    (OPEN, ev.Extended): Transition(extend, (OPEN,)),
    (OPEN, ev.Sealed): Transition(seal, (SEALED,)),
    (OPEN, ev.Withdrawn): Transition(withdraw, (RELEASED,)),
    (OPEN, ev.Claimed): Transition(claim, (OPEN,)),
    (OPEN, ev.Renewed): Transition(renew, (OPEN,)),
    (OPEN, ev.Confirmed): Transition(refuse_early_confirm, (OPEN,)),
    (OPEN, ev.Taken): Transition(refuse_early_take, (OPEN,)),
    (OPEN, ev.Returned): Transition(give_back, (OPEN,)),
    (OPEN, ev.EngineLost): Transition(end_with_engine, (RELEASED,)),
    (OPEN, ev.Stopped): Transition(end_with_agent, (RELEASED,)),
    (OPEN, ev.DeadlinePassed): Transition(expire, (OPEN, RELEASED)),
    (SEALED, ev.Extended): Transition(refuse_sealed, (SEALED,)),
    (SEALED, ev.Sealed): Transition(refuse_sealed, (SEALED,)),
    (SEALED, ev.Withdrawn): Transition(withdraw, (RELEASED,)),
    (SEALED, ev.Claimed): Transition(claim, (SEALED,)),
    (SEALED, ev.Renewed): Transition(renew, (SEALED,)),
    (SEALED, ev.Confirmed): Transition(confirm, (SEALED, RELEASED)),
    (SEALED, ev.Taken): Transition(take, (SEALED, RELEASED)),
    (SEALED, ev.Returned): Transition(give_back, (SEALED,)),
    (SEALED, ev.EngineLost): Transition(end_with_engine, (RELEASED,)),
    (SEALED, ev.Stopped): Transition(end_with_agent, (RELEASED,)),
    (SEALED, ev.DeadlinePassed): Transition(expire, (SEALED, RELEASED)),
    (RELEASED, ev.Extended): Transition(refuse_ended, (RELEASED,)),
    (RELEASED, ev.Sealed): Transition(refuse_ended, (RELEASED,)),
    (RELEASED, ev.Withdrawn): Transition(withdraw_again, (RELEASED,)),
    (RELEASED, ev.Claimed): Transition(refuse_ended, (RELEASED,)),
    (RELEASED, ev.Renewed): Transition(refuse_late, (RELEASED,)),
    (RELEASED, ev.Confirmed): Transition(confirm_again, (RELEASED,)),
    (RELEASED, ev.Taken): Transition(take_again, (RELEASED,)),
    (RELEASED, ev.Returned): Transition(refuse_late, (RELEASED,)),
}
