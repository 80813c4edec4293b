"""Tables with one mistake each: what the simulator must find."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvbus.errors import ErrorCode
from kvbus.protocol import Empty, Outcome
from kvbus.table import Table, Transition
from kvbus_decode.fetch import events as dec
from kvbus_decode.fetch import transitions as fetching
from kvbus_decode.fetch.state import FetchState
from kvbus_decode.fetch.table import FetchTable
from kvbus_decode.read import events as red
from kvbus_decode.read import transitions as reading
from kvbus_decode.read.leg import LegState
from kvbus_prefill.offer import events as pre
from kvbus_prefill.offer import transitions as offering
from kvbus_prefill.offer.entry import OfferState
from kvbus_prefill.slots import entry as slots
from kvbus_prefill.slots import events as slot

OPEN, SEALED = OfferState.OPEN, OfferState.SEALED
Patch = pytest.MonkeyPatch


def _change(patch: Patch, table: Any, states: Any, kind: type, handler: Callable[..., Any]) -> None:
    """In these states another handler has the event."""
    for state in states:
        patch.setitem(table, (state, kind), Transition(handler, ()))


def a_refused_confirm_is_taken_for_a_yes(patch: Patch) -> None:
    states = [FetchState.CONFIRMING]
    _change(patch, fetching.TRANSITIONS, states, dec.StepFailed, fetching.complete)


def blocks_are_released_at_the_grant(patch: Patch) -> None:
    def claim(offer: Any, event: Any, at: Any) -> list[Any]:
        opened = offer.opened
        names = opened.engine_id, opened.offer_id, opened.request_id
        released = pre.ReportReleased(*names, Outcome.WITHDRAWN, offer.num_tokens, offer.opened_at)
        return [*offering.claim(offer, event, at), released]

    _change(patch, offering.TRANSITIONS, [SEALED], pre.Claimed, claim)


def a_cancelled_fetch_does_not_drain(patch: Patch) -> None:
    def cancel(fetch: Any, event: Any, at: Any) -> list[Any]:
        fetch.chunk = None
        return fetching.cancel(fetch, event, at)

    states = [FetchState.READING]
    _change(patch, fetching.TRANSITIONS, states, dec.CancelRequested, cancel)


def a_dead_lease_is_confirmed(patch: Patch) -> None:
    def confirm(offer: Any, event: Any, _: Any) -> list[Any]:
        ended = offer.release(Outcome.COMPLETED, ErrorCode.OFFER_COMPLETED)
        return [pre.SendReply(event.reply_to, Empty()), *ended]

    _change(patch, offering.TRANSITIONS, [SEALED], pre.Confirmed, confirm)


def tables_are_not_compared_at_a_take(patch: Patch) -> None:
    def take(offer: Any, event: Any, at: Any) -> list[Any]:
        return offering.take(offer, msgspec.structs.replace(event, tables=offer.tables), at)

    _change(patch, offering.TRANSITIONS, [SEALED], pre.Taken, take)


def an_expired_lease_is_renewed(patch: Patch) -> None:
    def renew(offer: Any, event: Any, at: Any) -> list[Any]:
        lease = offer.leases.get(event.epoch)
        if lease is not None and lease.end is ErrorCode.LEASE_EXPIRED:
            lease.end = None
        return offering.renew(offer, event, at)

    _change(patch, offering.TRANSITIONS, [OPEN, SEALED], pre.Renewed, renew)


def the_epoch_is_not_raised(patch: Patch) -> None:
    def claim(offer: Any, event: Any, at: Any) -> list[Any]:
        offer.epoch = 0
        return offering.claim(offer, event, at)

    _change(patch, offering.TRANSITIONS, [OPEN, SEALED], pre.Claimed, claim)


def the_end_of_a_lease_is_forgotten(patch: Patch) -> None:
    def expire(offer: Any, _event: Any, at: Any) -> list[Any]:
        offer.expires_at = at.now + 1e6
        for lease in offer.live_leases:
            lease.expires_at = at.now + 1e6
        return []

    _change(patch, offering.TRANSITIONS, [OPEN, SEALED], pre.DeadlinePassed, expire)


def an_aborted_read_is_over_at_once(patch: Patch) -> None:
    def drop(read: Any, leg: Any, event: Any, now: float) -> list[Any]:
        return [*reading.abort_read(read, leg, event, now), *reading.drop(read, leg, event, now)]

    _change(patch, reading.TRANSITIONS, [LegState.READING], red.LegStopped, drop)


def a_slot_is_read_after_its_lease(patch: Patch) -> None:
    patch.setattr(reading, "USABLE_SHARE", 2.0)


def a_slot_is_free_while_it_is_gathered_into(patch: Patch) -> None:
    states = [slots.GATHERING]
    _change(patch, slots.TRANSITIONS, states, slot.LeaseEnded, slots.give_up)


def a_new_fetch_has_the_turn_of_one_that_waits(patch: Patch) -> None:
    patch.setattr(FetchTable, "_expire", Table._expire)


def bytes_that_differ_are_taken_for_good(patch: Patch) -> None:
    def end(read: Any, leg: Any, event: Any, now: float) -> list[Any]:
        return reading.end_compare(read, leg, msgspec.structs.replace(event, error=None), now)

    states = [LegState.COMPARING]
    _change(patch, reading.TRANSITIONS, states, red.CompareEnded, end)


def digests_are_made_before_all_has_landed(patch: Patch) -> None:
    states = [LegState.ASKING]
    _change(patch, reading.TRANSITIONS, states, red.DigestsCame, reading.compare)


MUTANTS = {
    a_refused_confirm_is_taken_for_a_yes: {2},
    blocks_are_released_at_the_grant: {1},
    a_cancelled_fetch_does_not_drain: {3},
    a_dead_lease_is_confirmed: {2, 5},
    tables_are_not_compared_at_a_take: {2},
    an_expired_lease_is_renewed: {5},
    the_epoch_is_not_raised: {5},
    the_end_of_a_lease_is_forgotten: {4},
    an_aborted_read_is_over_at_once: {3},
    a_slot_is_read_after_its_lease: {2},
    a_slot_is_free_while_it_is_gathered_into: {2, 4, 6},
    a_new_fetch_has_the_turn_of_one_that_waits: {4},
    bytes_that_differ_are_taken_for_good: {2},
    digests_are_made_before_all_has_landed: {2},
}
"""Each mistake, and the numbers of the invariants that it breaks."""
