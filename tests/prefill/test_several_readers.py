"""Offers that several readers may read, one behaviour at a time."""

import pytest

from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferState
from kvbus_prefill.offer.table import OfferTable
from tests.prefill.test_offers import (
    LIMITS,
    SECRET,
    claimed,
    code_of,
    granted,
    opened,
    outcomes,
    renewed,
    table_after,
    taken,
)


def claim_by(table: OfferTable, reader_id: str, now: float = 0.0) -> list[ev.Command]:
    """The reader's lease has a token of its own."""
    return table.handle(
        ev.Claimed("o1", SECRET, reader_id, 2.0, f"token of {reader_id}", "claim"), now
    )


def confirmed_by(reader_id: str, epoch: int) -> ev.Confirmed:
    return ev.Confirmed("o1", epoch, f"token of {reader_id}", "confirm")


def offer_of(*reader_ids: str, readers: int, sealed: bool = True) -> OfferTable:
    """An offer with a lease of each of these."""
    table = table_after(opened(readers=readers, sealed=sealed))
    for reader_id in reader_ids:
        granted(claim_by(table, reader_id))
    return table


def test_as_many_readers_as_may_have_a_lease_at_once_and_the_next_waits() -> None:
    table = offer_of("a", "b", readers=2)

    late = claim_by(table, "c", 1.0)
    table.handle(ev.Returned("o1", 1, "token of a", "return"), 1.0)

    assert code_of(late) is ErrorCode.BUSY
    assert granted(claim_by(table, "c", 1.0)).epoch == 3
    assert table.num_leases() == 2


def test_the_blocks_are_released_when_the_last_reader_has_everything() -> None:
    table = offer_of("a", "b", readers=3)

    first = table.handle(confirmed_by("b", 2), 1.0)
    second = table.handle(taken("c"), 1.0)
    last = table.handle(confirmed_by("a", 1), 1.0)

    assert [outcomes(commands) for commands in (first, second)] == [[], []]
    kinds = [type(c) for c in last if not isinstance(c, ev.Publish)]
    assert kinds == [ev.SendReply, ev.EndLease, ev.ReportReleased]
    assert outcomes(last) == [Outcome.COMPLETED]


def test_who_comes_when_all_others_have_read_is_the_last_one() -> None:
    table = offer_of(readers=2)
    table.handle(taken("a"), 1.0)
    granted(claim_by(table, "b", 1.0))

    assert code_of(table.handle(taken("c", token="other"), 1.0)) is ErrorCode.BUSY
    assert outcomes(table.handle(confirmed_by("b", 2), 1.0)) == [Outcome.COMPLETED]
    assert code_of(claim_by(table, "c", 1.0)) is ErrorCode.OFFER_COMPLETED


@pytest.mark.parametrize("while_live", [True, False])
def test_a_yes_whose_reply_was_lost_is_said_again_and_counts_once(while_live: bool) -> None:
    table = offer_of("a", readers=3)
    table.handle(confirmed_by("a", 1), 1.0)
    table.handle(taken("b"), 1.0)
    if not while_live:
        table.handle(taken("c", token="other"), 1.0)

    again = [*table.handle(confirmed_by("a", 1), 1.0), *table.handle(taken("b"), 1.0)]

    assert [type(command) for command in again] == 2 * [ev.SendReply]
    assert ("o1" in table.live) == while_live


def test_a_yes_is_said_again_after_any_number_of_readers_that_gave_up() -> None:
    table = offer_of("a", readers=2)
    table.handle(confirmed_by("a", 1), 1.0)
    for number in range(10):
        epoch = granted(claim_by(table, f"b{number}", 1.0)).epoch
        table.handle(ev.Returned("o1", epoch, f"token of b{number}", "return"), 1.0)

    (again,) = table.handle(confirmed_by("a", 1), 1.0)

    assert isinstance(again, ev.SendReply)
    assert len(table.live["o1"].leases) <= 4


def test_a_reader_that_is_late_does_not_disturb_another() -> None:
    table = offer_of("a", "b", readers=2)
    renewal = ev.Renewed("o1", 2, "token of b", 4.0, {}, "renew")
    table.handle(renewal, 1.0)

    late = table.handle(confirmed_by("a", 1), 3.0)

    assert code_of([c for c in late if isinstance(c, ev.Refuse)]) is ErrorCode.LEASE_EXPIRED
    assert outcomes(table.handle(confirmed_by("b", 2), 3.0)) == []
    assert table.live["o1"].state is OfferState.SEALED


def test_the_token_of_one_reader_is_not_the_right_of_another() -> None:
    table = offer_of("a", "b", readers=2)

    assert code_of(table.handle(confirmed_by("a", 2), 1.0)) is ErrorCode.FORBIDDEN
    assert code_of(table.handle(renewed(1), 1.0)) is ErrorCode.FORBIDDEN


def test_a_withdrawn_offer_revokes_every_lease_before_it_is_reported_released() -> None:
    table = offer_of("a", "b", readers=2, sealed=False)

    commands = table.handle(ev.Withdrawn("o1", None, "withdraw"), 1.0)

    kinds = [type(c) for c in commands if not isinstance(c, ev.Publish)]
    assert kinds == [ev.SendReply, ev.EndLease, ev.EndLease, ev.ReportReleased]
    assert [code_of(table.handle(confirmed_by(*of), 1.0)) for of in (("a", 1), ("b", 2))] == [
        ErrorCode.OFFER_WITHDRAWN,
        ErrorCode.OFFER_WITHDRAWN,
    ]


def test_an_offer_that_fewer_have_read_than_may_is_completed_by_its_time_to_live() -> None:
    table = offer_of("a", readers=2)
    table.handle(confirmed_by("a", 1), 1.0)

    commands = table.handle(ev.DeadlinePassed(), 8.0)

    assert outcomes(commands) == [Outcome.COMPLETED]
    assert code_of(claim_by(table, "b", 8.0)) is ErrorCode.OFFER_EXPIRED


def test_a_lease_of_any_reader_outlasts_the_time_to_live() -> None:
    table = table_after(opened(readers=2, ttl_s=1.0), claimed("a"))
    table.handle(claimed("b", lease_s=LIMITS.max_lease_s), 0.5)

    assert outcomes(table.handle(ev.DeadlinePassed(), 2.0)) == []
    assert table.num_leases() == 1
    assert outcomes(table.handle(ev.DeadlinePassed(), 4.5)) == [Outcome.EXPIRED]


def test_the_next_process_of_an_agent_ends_all_leases_of_the_one_before() -> None:
    table = table_after(opened(readers=2))
    for reader_id in ("a", "b"):
        table.handle(process_claim(reader_id, "boot-1"), 0.0)

    commands = table.handle(process_claim("c", "boot-2"), 1.0)

    assert sum(isinstance(command, ev.EndLease) for command in commands) == 2
    assert granted(commands).epoch == 3
    assert table.num_leases() == 1


def process_claim(reader_id: str, boot: str) -> ev.Claimed:
    process = ev.ReaderProcess("decode", boot)
    return ev.Claimed("o1", SECRET, reader_id, 2.0, f"token of {reader_id}", "claim", "", process)
