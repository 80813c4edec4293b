"""The fetch table with reads by the ticket's own blocks, one behaviour at a time."""

import pytest
from msgspec.structs import replace

from kvbus.errors import ErrorCode
from kvbus.geometry import BlockTable
from kvbus.protocol import Outcome
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.ahead import Ahead
from kvbus_decode.fetch.state import FetchState
from tests.decode.test_fetches import (
    CANCEL,
    CONFIRMED,
    LIMITS,
    READ,
    failed,
    kinds,
    lease,
    report,
    requested,
    table_after,
)

TABLES = {"full": BlockTable.of([7])}
ALONE = replace(requested(), route="known", ahead=Ahead(TABLES, claims=False))
BESIDE = replace(requested(), route="known", ahead=Ahead(TABLES, claims=True))
OTHERS = lease(first_block=1)
"""A grant of other blocks than the ticket named."""


def test_a_short_read_asks_once_after_its_last_byte() -> None:
    table = table_after()

    steps = [table.handle(event, 0.0) for event in (ALONE, READ, CONFIRMED)]

    assert [kinds(commands) for commands in steps] == [
        [ev.HoldPeer, ev.ReadChunk, ev.SendReply],
        [ev.SendTake],
        [ev.ReportFetched],
    ]
    end = report(steps[-1])
    assert (end.outcome, end.ahead, end.leased) == (Outcome.COMPLETED, True, False)
    assert table.find("f1").requested.ahead is None, "a retired fetch keeps no tables"


def test_what_is_read_and_taken_are_the_blocks_of_the_ticket() -> None:
    table = table_after()

    (read,) = (c for c in table.handle(ALONE, 0.0) if isinstance(c, ev.ReadChunk))
    (take,) = table.handle(READ, 0.0)

    assert (read.tables, read.start, read.stop, read.last) == (TABLES, 0, 32, True)
    assert isinstance(take, ev.SendTake)
    assert take.tables == TABLES


def test_a_read_that_takes_long_asks_for_the_lease_and_confirms_under_it() -> None:
    table = table_after(ALONE)

    steps = [table.handle(ev.DeadlinePassed(), LIMITS.claim_after_s)]
    steps += [table.handle(event, 1.0) for event in (lease(), READ)]

    assert [kinds(commands) for commands in steps] == [[ev.SendClaim], [], [ev.SendConfirm]]


@pytest.mark.parametrize("first", [lease(), READ], ids=["granted first", "read first"])
def test_a_claim_beside_the_read_is_confirmed_when_both_are_there(first: ev.Event) -> None:
    table = table_after()
    second = READ if first is not READ else lease()

    steps = [table.handle(event, 0.0) for event in (BESIDE, first, second)]

    assert [kinds(commands) for commands in steps] == [
        [ev.SendClaim, ev.ReadChunk, ev.SendReply],
        [],
        [ev.SendConfirm],
    ]
    end = report(table.handle(CONFIRMED, 0.0))
    assert (end.ahead, end.leased) == (True, True)


def test_a_read_goes_on_while_another_reader_has_the_lease_and_takes_what_that_gave_back() -> None:
    table = table_after(BESIDE)

    busy = table.handle(failed(ErrorCode.BUSY), 0.0)

    assert busy == []
    assert kinds(table.handle(READ, 0.1)) == [ev.SendTake]


def test_a_claim_that_was_busy_is_sent_again_while_the_read_lasts() -> None:
    table = table_after(BESIDE, failed(ErrorCode.BUSY))

    assert kinds(table.handle(ev.DeadlinePassed(), LIMITS.busy_retry_s)) == [ev.SendClaim]


@pytest.mark.parametrize("code", [ErrorCode.OFFER_COMPLETED, ErrorCode.PEER_LOST])
def test_a_claim_beside_the_read_that_is_refused_stops_the_read_and_drains(code: ErrorCode) -> None:
    table = table_after(BESIDE)

    commands = table.handle(failed(code), 0.0)

    assert kinds(commands) == [ev.StopRead, ev.ReportFetched]
    assert not report(commands).blocks_free
    assert kinds(table.handle(READ, 0.0)) == [ev.ReportBlocksFreed]


def test_a_take_that_was_busy_is_asked_again_after_a_moment_until_the_deadline() -> None:
    table = table_after(ALONE, READ)

    assert table.handle(failed(ErrorCode.BUSY), 0.0) == []
    assert kinds(table.handle(ev.DeadlinePassed(), LIMITS.busy_retry_s)) == [ev.SendTake]
    table.handle(failed(ErrorCode.BUSY), 59.9)
    end = report(table.handle(ev.DeadlinePassed(), 60.0))
    assert end.error is not None
    assert (end.error.code, end.blocks_free) == (ErrorCode.TIMEOUT, True)


def test_a_take_that_is_busy_after_the_deadline_is_not_sent_again_and_was_decided() -> None:
    table = table_after(ALONE, READ)

    end = report(table.handle(failed(ErrorCode.BUSY), 60.5))

    assert end.error is not None
    assert (end.error.code, end.undecided) == (ErrorCode.TIMEOUT, False)


def test_a_take_without_a_reply_is_asked_again_and_a_refused_one_fails_the_fetch() -> None:
    table = table_after(ALONE, READ)

    assert kinds(table.handle(failed(ErrorCode.TIMEOUT), 5.0)) == [ev.SendTake]
    end = report(table.handle(failed(ErrorCode.OFFER_EXPIRED), 6.0))
    assert (end.outcome, end.stage, end.blocks_free) == (Outcome.FAILED, "confirming", True)


def test_a_confirm_is_not_busy() -> None:
    table = table_after(BESIDE, lease(), READ)

    assert report(table.handle(failed(ErrorCode.BUSY), 0.0)).outcome is Outcome.FAILED


def test_an_offer_with_other_blocks_than_the_ticket_fails_and_gives_the_lease_back() -> None:
    table = table_after(BESIDE)

    end = report(table.handle(OTHERS, 0.0))
    drained = table.handle(READ, 0.0)

    assert end.error is not None
    assert end.error.code is ErrorCode.GEOMETRY
    assert kinds(drained) == [ev.SendRelease, ev.ReportBlocksFreed]


def test_a_lease_that_is_granted_to_a_fetch_that_drains_goes_back_when_it_has_drained() -> None:
    table = table_after(BESIDE, CANCEL)
    assert table.num_in(FetchState.DRAINING) == 1

    granted = table.handle(lease(), 0.0)
    drained = table.handle(READ, 0.0)

    assert granted == [], "the prefill agent drives the read as long as the lease lives"
    assert kinds(drained) == [ev.SendRelease, ev.ReportBlocksFreed]


def test_an_engine_that_has_all_tokens_takes_the_offer_without_a_read_or_a_lease() -> None:
    table = table_after()

    commands = table.handle(replace(BESIDE, first_token=32), 0.0)

    assert kinds(commands) == [ev.HoldPeer, ev.SendTake, ev.SendReply]
