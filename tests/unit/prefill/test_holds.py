"""Offers that are kept for requests in the queue of a decode engine."""

from typing import Any

import pytest

from kvbus import protocol
from kvbus.geometry import BlockTable
from kvbus.protocol import MakeOffer, OffersKept
from kvbus.table.events import DeadlinePassed, EngineLost, SendReply
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferLimits
from kvbus_prefill.offer.table import OfferTable
from tests.unit.prefill.tickets import ticket_for

NAME, SECRET, FORGED = "n" * 32, "s" * 32, "f" * 32
TTL_S, KEEP_S, HOLD_S = 5.0, 15.0, 60.0
LIMITS = OfferLimits(max_hold_s=HOLD_S, max_lease_s=30.0, max_names=2)
BY_ID, BY_NAME = protocol.HeldOffer(SECRET, "o1"), protocol.HeldOffer(NAME)
WITHDRAWN = ev.RequestReceived(protocol.WithdrawOffer(offer_id="o1"), "engine", engine_id="engine")


def opened(ttl_s: float = TTL_S) -> ev.Opened:
    message = MakeOffer("r", 8, {"full": BlockTable.of([3])}, transfer_id=NAME)
    return ev.Opened(message, "engine", ticket_for(message, "o1", SECRET), ttl_s=ttl_s)


def keep(
    table: OfferTable,
    now: float,
    *held: protocol.HeldOffer,
    tenant: str = "agent",
    may_come: bool = False,
) -> list[int]:
    """Return the positions of those that are over."""
    message = protocol.KeepOffers(held, KEEP_S)
    *_, reply = table.handle(ev.KeepRequested(message, "call", tenant, may_come), now)
    assert isinstance(reply, SendReply)
    assert isinstance(reply.body, OffersKept)
    return [*reply.body.over]


def with_offer(**options: Any) -> OfferTable:
    table = OfferTable(LIMITS)
    table.handle(opened(**options), 0.0)
    return table


def lives(table: OfferTable, now: float) -> bool:
    table.handle(DeadlinePassed(), now)
    return "o1" in table.live


@pytest.mark.parametrize("held", [BY_ID, BY_NAME])
def test_held_offer_outlives_its_ttl_until_holds_stop(held: protocol.HeldOffer) -> None:
    table = with_offer()
    for now in (4.0, 14.0, 24.0):
        assert keep(table, now, held) == []
        assert lives(table, now + KEEP_S - 0.1)
    assert table.num_held == 1
    assert not lives(table, 24.0 + KEEP_S)
    assert table.num_held == 0


def test_offer_is_held_for_max_hold_s_and_then_over() -> None:
    table = with_offer()
    for now in range(0, int(HOLD_S), 5):
        assert keep(table, float(now), BY_ID) == []
    assert lives(table, HOLD_S - 0.1)
    assert keep(table, HOLD_S - 0.1, BY_ID) == []
    assert not lives(table, HOLD_S)
    table = with_offer(ttl_s=1000.0)
    keep(table, 0.0, BY_ID)
    assert keep(table, HOLD_S, BY_ID) == [0]
    assert lives(table, 999.0)


def test_agent_grants_a_lease_at_most_and_never_shortens() -> None:
    table = with_offer(ttl_s=100.0)
    message = protocol.KeepOffers((BY_ID,), 1000.0)
    (reply,) = table.handle(ev.KeepRequested(message, "call", "agent", may_come=False), 0.0)
    assert reply == SendReply("call", OffersKept(LIMITS.max_lease_s))
    assert lives(table, 99.0)


def test_only_wrong_ended_and_unknown_offers_are_over() -> None:
    table = with_offer()
    forged, unknown = protocol.HeldOffer(FORGED, "o1"), protocol.HeldOffer(SECRET, "o2")
    assert keep(table, 1.0, forged, BY_ID, unknown, BY_NAME) == [0, 2]
    assert keep(table, 1.0, forged, unknown, may_come=True) == [0]
    table.handle(WITHDRAWN, 2.0)
    assert keep(table, 3.0, BY_ID, BY_NAME, forged, may_come=True) == [0, 1, 2]


def test_forged_hold_keeps_nothing() -> None:
    table = with_offer()
    keep(table, 4.0, protocol.HeldOffer(FORGED, "o1"))
    assert not lives(table, TTL_S)


def test_offer_that_its_engine_may_publish_again_is_not_over() -> None:
    table = with_offer()
    table.handle(EngineLost("engine"), 1.0)
    assert keep(table, 2.0, BY_ID, BY_NAME) == []


def test_name_is_held_before_the_offer_is_made() -> None:
    table = OfferTable(LIMITS)
    assert keep(table, 0.0, BY_NAME) == []
    table.handle(opened(ttl_s=1.0), 2.0)
    assert lives(table, KEEP_S - 0.1)
    assert not lives(table, KEEP_S)


NAMES = [protocol.HeldOffer(letter * 32) for letter in "abc"]


def lifetime_after(table: OfferTable, now: float) -> float:
    """Make the offer with a short time to live, and return how long it lives."""
    table.handle(opened(ttl_s=1.0), now)
    return next(after for after in (1.0, KEEP_S, HOLD_S) if not lives(table, now + after))


@pytest.mark.parametrize(("tenant", "lives_s"), [("agent", 1.0), ("another", KEEP_S)])
def test_held_names_are_bounded_and_each_tenant_has_its_share(tenant: str, lives_s: float) -> None:
    table = OfferTable(LIMITS)
    keep(table, 0.0, *NAMES)
    assert keep(table, 0.0, BY_NAME, tenant=tenant) == []
    keep(table, 0.0, *NAMES)
    assert lifetime_after(table, 0.0) == lives_s


def test_name_that_is_held_no_longer_leaves_its_place() -> None:
    table = OfferTable(LIMITS)
    keep(table, 0.0, *NAMES)
    keep(table, KEEP_S, BY_NAME)
    assert lifetime_after(table, KEEP_S) == KEEP_S
    table = OfferTable(LIMITS)
    keep(table, 0.0, BY_NAME)
    assert lifetime_after(table, KEEP_S) == 1.0


def test_renewals_leave_room_in_the_history() -> None:
    table = with_offer()
    for now in range(50):
        keep(table, float(now), BY_ID)
    names = [step[2].__name__ for step in table.live["o1"].history.steps]
    assert names == ["MakeOffer", "KeepOffers"]
