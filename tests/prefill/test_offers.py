"""The offer table, one behaviour at a time."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec.structs import replace as altered

from kvbus.errors import ErrorCode, KVBusError
from kvbus.geometry import BlockTable
from kvbus.protocol import Granted, Outcome
from kvbus.table import KEPT_ANYWAY, KEPT_S
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferedBox, OfferLimits, OfferState
from kvbus_prefill.offer.table import OfferTable
from kvbus_prefill.offer.transitions import TRANSITIONS

SECRET, TOKEN = "secret", "token"
LIMITS = OfferLimits(max_offers=2, max_retired=2, max_lease_s=4.0, max_hold_s=10.0)
OPEN, SEALED, RELEASED = OfferState.OPEN, OfferState.SEALED, OfferState.RELEASED
REQUESTS = (
    ev.Extended,
    ev.Sealed,
    ev.Withdrawn,
    ev.Claimed,
    ev.Renewed,
    ev.Confirmed,
    ev.Taken,
    ev.Returned,
)
OWNERS_AND_TIME = (ev.EngineLost, ev.Stopped, ev.DeadlinePassed)


def opened(
    offer_id: str = "o1", *, sealed: bool = True, ttl_s: float = 8.0, readers: int = 1
) -> ev.Opened:
    return ev.Opened(
        offer_id=offer_id,
        engine_id="engine",
        request_id=f"request-{offer_id}",
        num_tokens=32,
        tables={"full": BlockTable.of([3, 4])},
        sealed=sealed,
        ttl_s=ttl_s,
        secret=SECRET,
        ticket={"offer_id": offer_id},
        reply_to="open",
        readers=readers,
    )


def claimed(reader_id: str = "reader", *, lease_s: float = 2.0) -> ev.Claimed:
    return ev.Claimed("o1", SECRET, reader_id, lease_s, TOKEN, "claim")


def renewed(epoch: int, *, lease_s: float = 2.0, known_blocks: int = 0) -> ev.Renewed:
    return ev.Renewed("o1", epoch, TOKEN, lease_s, {"full": known_blocks}, "renew")


def taken(
    reader_id: str = "reader", *, token: str = "own", blocks: tuple[int, ...] = (3, 4)
) -> ev.Taken:
    tables = {"full": BlockTable.of(blocks)}
    return ev.Taken("o1", SECRET, reader_id, token, tables, "take")


def offered_box(
    epoch: int = 1,
    *,
    blocks: tuple[int, ...] = (4,),
    first_block: int = 1,
    stop: int = 32,
    opaque: bool = False,
) -> OfferedBox:
    table = BlockTable.of(blocks, first_block=first_block)
    return OfferedBox("o1", epoch, TOKEN, "full", table, stop, opaque)


def refusal_of(table: OfferTable, box: OfferedBox, now: float = 1.0) -> ErrorCode | None:
    """Why a box may not be packed, None when it may; asking changes nothing."""
    before = replace(table.find(box.offer_id)), table.next_deadline()
    try:
        table.check_box(box, now)
    except KVBusError as error:
        return error.code
    finally:
        assert (table.find(box.offer_id), table.next_deadline()) == before
    return None


def table_after(*events: ev.Event, now: float = 0.0) -> OfferTable:
    table = OfferTable(LIMITS)
    for event in events:
        table.handle(event, now)
    return table


def granted(commands: list[ev.Command]) -> Granted:
    (body,) = (c.body for c in commands if isinstance(c, ev.SendReply))
    assert isinstance(body, Granted)
    return body


def code_of(commands: list[ev.Command]) -> ErrorCode:
    (error,) = (c.error for c in commands if isinstance(c, ev.Refuse))
    return error.code


def outcomes(commands: list[ev.Command]) -> list[Outcome]:
    return [c.outcome for c in commands if isinstance(c, ev.ReportReleased)]


def test_the_table_has_a_transition_for_every_state_and_event_that_can_meet() -> None:
    live = {(state, kind) for state in (OPEN, SEALED) for kind in REQUESTS + OWNERS_AND_TIME}
    ended = {(RELEASED, kind) for kind in REQUESTS}

    assert set(TRANSITIONS) == live | ended


def test_a_released_offer_never_comes_back() -> None:
    assert all(
        transition.to == (RELEASED,)
        for (state, _), transition in TRANSITIONS.items()
        if state is RELEASED
    )


def test_a_confirm_ends_the_lease_before_the_blocks_are_reported_released() -> None:
    table = table_after(opened(), claimed())

    commands = table.handle(ev.Confirmed("o1", 1, TOKEN, "confirm"), 1.0)

    kinds = [type(c) for c in commands if not isinstance(c, ev.Publish)]
    assert kinds == [ev.SendReply, ev.EndLease, ev.ReportReleased]
    assert outcomes(commands) == [Outcome.COMPLETED]


def test_a_confirm_whose_reply_was_lost_is_answered_ok_again_and_reports_nothing() -> None:
    confirm = ev.Confirmed("o1", 1, TOKEN, "confirm")
    table = table_after(opened(), claimed(), confirm)

    commands = table.handle(confirm, 1.0)

    assert [type(c) for c in commands] == [ev.SendReply]


def test_a_take_of_a_sealed_offer_that_nobody_has_leased_completes_it() -> None:
    table = table_after(opened())

    commands = table.handle(taken(), 1.0)

    kinds = [type(c) for c in commands if not isinstance(c, ev.Publish)]
    assert kinds == [ev.SendReply, ev.ReportReleased]
    assert outcomes(commands) == [Outcome.COMPLETED]


def test_a_take_whose_reply_was_lost_is_answered_ok_again_and_reports_nothing() -> None:
    table = table_after(opened(), taken())

    commands = table.handle(taken(), 1.0)

    assert [type(c) for c in commands] == [ev.SendReply]


@pytest.mark.parametrize(
    "other", [taken(token="another"), altered(taken(), holder="other")], ids=["token", "key"]
)
def test_a_second_take_is_told_that_the_offer_is_completed(other: ev.Taken) -> None:
    table = table_after(opened(), taken())

    assert code_of(table.handle(other, 1.0)) is ErrorCode.OFFER_COMPLETED


def test_a_confirm_of_a_lease_that_ended_before_another_reader_took_the_offer_is_stale() -> None:
    table = table_after(opened(), claimed(), ev.Returned("o1", 1, TOKEN, "return"))
    table.handle(taken("another"), 1.0)

    commands = table.handle(ev.Confirmed("o1", 1, TOKEN, "confirm"), 1.0)

    assert code_of(commands) is ErrorCode.STALE


def test_a_take_that_shows_the_token_of_the_last_lease_is_told_that_the_offer_was_withdrawn() -> (
    None
):
    table = table_after(opened(), claimed(), ev.Withdrawn("o1", None, "withdraw"))

    assert code_of(table.handle(taken(token=TOKEN), 1.0)) is ErrorCode.OFFER_WITHDRAWN


def test_a_take_of_an_offer_that_was_confirmed_is_no_repeated_one() -> None:
    table = table_after(opened(), claimed(), ev.Confirmed("o1", 1, TOKEN, "confirm"))

    assert code_of(table.handle(taken(), 1.0)) is ErrorCode.OFFER_COMPLETED


def test_a_take_while_another_reader_has_the_lease_is_busy_until_that_gave_it_back() -> None:
    table = table_after(opened(), claimed("another"))

    first = table.handle(taken(), 1.0)
    table.handle(ev.Returned("o1", 1, TOKEN, "return"), 1.0)
    second = table.handle(taken(), 1.0)

    assert code_of(first) is ErrorCode.BUSY
    assert outcomes(second) == [Outcome.COMPLETED]


def test_a_take_by_who_has_the_lease_ends_it_before_the_blocks_are_reported_released() -> None:
    table = table_after(opened(), claimed())

    commands = table.handle(taken(), 1.0)

    kinds = [type(c) for c in commands if not isinstance(c, ev.Publish)]
    assert kinds == [ev.SendReply, ev.EndLease, ev.ReportReleased]


def test_a_take_with_the_readers_name_and_another_key_does_not_end_its_lease() -> None:
    table = table_after(opened(), claimed())

    assert code_of(table.handle(altered(taken(), holder="other"), 1.0)) is ErrorCode.BUSY
    assert table.num_leases() == 1


def test_what_was_read_out_of_other_blocks_than_those_of_the_offer_is_nothing() -> None:
    table = table_after(opened())

    commands = table.handle(taken(blocks=(3, 5)), 1.0)

    assert code_of(commands) is ErrorCode.GEOMETRY
    assert table.live["o1"].state is SEALED


def test_a_take_before_the_seal_is_refused_and_the_offer_goes_on() -> None:
    table = table_after(opened(sealed=False))

    assert code_of(table.handle(taken(), 1.0)) is ErrorCode.OFFER_OPEN
    assert table.live["o1"].state is OPEN


def test_an_open_offer_outlives_its_ttl_while_a_reader_asks_to_take_it() -> None:
    table = table_after(opened(sealed=False, ttl_s=8.0))
    for now in (7.0, 10.0, 13.0):
        assert code_of(table.handle(taken(), now)) is ErrorCode.OFFER_OPEN

    table.handle(ev.Sealed("o1", "seal"), 14.0)

    assert outcomes(table.handle(taken(), 14.1)) == [Outcome.COMPLETED]


def test_a_reader_that_asks_no_more_keeps_an_open_offer_for_a_lease_and_no_longer() -> None:
    table = table_after(opened(sealed=False, ttl_s=8.0))
    table.handle(taken(), 7.0)

    before = table.handle(ev.DeadlinePassed(), 7.0 + LIMITS.max_lease_s - 0.1)
    after = table.handle(ev.DeadlinePassed(), 7.0 + LIMITS.max_lease_s)

    assert (outcomes(before), outcomes(after)) == ([], [Outcome.EXPIRED])


def test_readers_that_ask_for_ever_keep_an_open_offer_for_as_long_as_one_may_hold_it() -> None:
    table = table_after(opened(sealed=False, ttl_s=8.0))

    times = [7.0 + step for step in range(30)]
    asked = {now: outcomes(table.handle(taken(f"reader-{now}"), now)) for now in times}

    ended = [now for now, outcome in asked.items() if outcome == [Outcome.EXPIRED]]
    assert ended == [7.0 + LIMITS.max_hold_s]


def test_who_has_not_the_secret_does_not_keep_an_open_offer() -> None:
    table = table_after(opened(sealed=False, ttl_s=8.0))

    table.handle(altered(taken(), secret="another"), 7.0)

    assert outcomes(table.handle(ev.DeadlinePassed(), 8.0)) == [Outcome.EXPIRED]


def test_a_lost_engine_ends_an_open_offer_that_a_reader_asks_to_take() -> None:
    table = table_after(opened(sealed=False, ttl_s=8.0))
    table.handle(taken(), 7.0)

    assert outcomes(table.handle(ev.EngineLost("engine"), 9.0)) == [Outcome.WITHDRAWN]


def test_a_take_that_comes_when_the_offer_expires_is_late_though_nobody_told_the_time() -> None:
    table = table_after(opened(ttl_s=1.0))

    assert code_of(table.handle(taken(), 1.0)) is ErrorCode.OFFER_EXPIRED


LATE: dict[str, Callable[[int], ev.Event]] = {
    "renew": renewed,
    "confirm": lambda epoch: ev.Confirmed("o1", epoch, TOKEN, "confirm"),
    "return": lambda epoch: ev.Returned("o1", epoch, TOKEN, "return"),
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "open"])
def test_an_old_epoch_is_answered_stale_and_leaves_the_new_lease_alone(
    late: Callable[[int], ev.Event], sealed: bool
) -> None:
    table = table_after(opened(sealed=sealed), claimed(), claimed())

    commands = table.handle(late(1), 1.0)

    assert code_of(commands) is ErrorCode.STALE
    assert refusal_of(table, offered_box(epoch=1)) is ErrorCode.STALE
    assert table.num_leases() == 1
    assert table.next_deadline() == 2.0


def test_an_old_epoch_of_an_offer_that_another_one_completed_is_answered_stale() -> None:
    table = table_after(opened(), claimed(), claimed(), ev.Confirmed("o1", 2, TOKEN, "confirm"))

    commands = table.handle(ev.Confirmed("o1", 1, TOKEN, "confirm"), 1.0)

    assert code_of(commands) is ErrorCode.STALE


def test_a_confirm_that_comes_at_the_end_of_the_lease_is_late_though_nobody_told_the_time() -> None:
    table = table_after(opened(), claimed(lease_s=2.0))

    commands = table.handle(ev.Confirmed("o1", 1, TOKEN, "confirm"), 2.0)

    assert code_of(commands) is ErrorCode.LEASE_EXPIRED
    assert ev.EndLease("o1", 1, "expired", ErrorCode.LEASE_EXPIRED) in commands


ENDS = {
    ErrorCode.OFFER_WITHDRAWN: ev.Withdrawn("o1", None, "withdraw"),
    ErrorCode.ENGINE_LOST: ev.EngineLost("engine"),
    ErrorCode.DRAINING: ev.Stopped(),
}


@pytest.mark.parametrize("code", ENDS)
@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_a_reader_is_told_what_ended_its_lease_and_never_ok(
    late: Callable[[int], ev.Event], code: ErrorCode
) -> None:
    table = table_after(opened(), claimed(), ENDS[code])

    commands = table.handle(late(1), 1.0)
    claim = table.handle(claimed(), 1.0)

    assert [type(command) for command in commands] == [ev.Refuse]
    assert code_of(commands) is code
    assert code_of(claim) is code
    assert refusal_of(table, offered_box()) is code


def test_a_reader_whose_lease_ended_before_its_offer_did_is_told_so() -> None:
    table = table_after(opened(ttl_s=1.0), claimed(lease_s=2.0))

    table.handle(ev.DeadlinePassed(), 3.0)

    assert code_of(table.handle(renewed(1), 3.0)) is ErrorCode.LEASE_EXPIRED
    assert code_of(table.handle(claimed(), 3.0)) is ErrorCode.OFFER_EXPIRED


def test_a_confirm_before_the_seal_is_refused_and_the_lease_goes_on() -> None:
    table = table_after(opened(sealed=False), claimed())

    commands = table.handle(ev.Confirmed("o1", 1, TOKEN, "confirm"), 1.0)

    assert code_of(commands) is ErrorCode.OFFER_OPEN
    assert table.num_leases() == 1


def test_another_reader_is_told_busy_and_when_to_come_again() -> None:
    table = table_after(opened(), claimed("first", lease_s=2.0))

    for now, pause_s in (0.5, 0.25), (1.875, 0.125):
        for event in claimed("second"), taken("second"):
            (refusal,) = table.handle(event, now)
            assert isinstance(refusal, ev.Refuse)
            assert refusal.error.code is ErrorCode.BUSY
            assert refusal.error.detail == {"retry_after_s": pause_s}


NEXT = ev.ReaderProcess("decode-0", "second boot")


def lease_of(agent_id: str, boot: str = "first boot") -> OfferTable:
    """An offer whose lease another process has, of some agent."""
    process = ev.ReaderProcess(agent_id, boot)
    return table_after(opened(), altered(claimed("before"), process=process))


def test_the_next_process_of_a_reader_gets_the_lease_of_the_one_before_at_once() -> None:
    table = lease_of("decode-0")

    commands = table.handle(altered(claimed("after"), process=NEXT), 1.0)
    confirmed = table.handle(ev.Confirmed("o1", 1, TOKEN, "confirm"), 1.0)

    assert ev.EndLease("o1", 1, "revoked", ErrorCode.STALE) in commands
    assert ev.BeginLease("o1", 2) in commands
    assert code_of(confirmed) is ErrorCode.STALE


def test_the_next_process_of_a_reader_may_take_what_the_one_before_had_a_lease_of() -> None:
    commands = lease_of("decode-0").handle(altered(taken("after"), process=NEXT), 1.0)

    assert outcomes(commands) == [Outcome.COMPLETED]
    assert ev.EndLease("o1", 1, "revoked", ErrorCode.OFFER_COMPLETED) not in commands


@pytest.mark.parametrize(
    ("table", "event"),
    [
        (lease_of("decode-1"), altered(claimed("after"), process=NEXT)),
        (lease_of("decode-0", NEXT.boot), altered(claimed("after"), process=NEXT)),
        (lease_of("decode-0"), altered(claimed("after"), process=NEXT, holder="other key")),
        (lease_of("decode-0"), altered(taken("after"), process=NEXT, holder="other key")),
        (lease_of(""), altered(claimed("after"), process=ev.ReaderProcess("", "second boot"))),
    ],
    ids=["another agent", "the same process", "another key", "a take by another key", "no names"],
)
def test_who_is_not_the_next_process_of_the_reader_has_to_wait(
    table: OfferTable, event: ev.Claimed | ev.Taken
) -> None:
    assert code_of(table.handle(event, 1.0)) is ErrorCode.BUSY
    assert table.num_leases() == 1


def test_a_withdrawn_offer_revokes_its_lease_before_it_is_reported_released() -> None:
    table = table_after(opened(), claimed())

    commands = table.handle(ev.Withdrawn("o1", None, "withdraw"), 1.0)

    kinds = [type(c) for c in commands if not isinstance(c, ev.Publish)]
    assert kinds == [ev.SendReply, ev.EndLease, ev.ReportReleased]
    assert ev.EndLease("o1", 1, "revoked", ErrorCode.OFFER_WITHDRAWN) in commands


def test_a_lease_outlasts_the_time_to_live_and_the_offer_expires_with_it() -> None:
    table = table_after(opened(ttl_s=1.0), claimed(lease_s=3.0))

    early = table.handle(ev.DeadlinePassed(), 2.0)
    due = table.handle(ev.DeadlinePassed(), 3.0)

    assert early == []
    assert outcomes(due) == [Outcome.EXPIRED]


def test_no_renewal_moves_the_end_of_a_lease_past_the_longest_hold() -> None:
    table = table_after(opened(), claimed(lease_s=4.0))

    for now in (3.0, 6.0, 9.0):
        grant = granted(table.handle(renewed(1, lease_s=4.0), now))

    assert grant.lease_s == 1.0
    assert outcomes(table.handle(ev.DeadlinePassed(), 10.0)) == [Outcome.EXPIRED]


def test_a_reader_that_claims_again_and_again_holds_no_longer_than_one_that_renews() -> None:
    table = table_after(opened(ttl_s=1.0), claimed(lease_s=4.0))

    for now in (3.0, 6.0, 9.0):
        table.handle(claimed(lease_s=4.0), now)

    assert outcomes(table.handle(ev.DeadlinePassed(), 10.0)) == [Outcome.EXPIRED]


def test_a_renewal_brings_only_the_blocks_that_the_reader_does_not_know() -> None:
    table = table_after(opened(sealed=False), claimed())
    table.handle(ev.Extended("o1", 48, {"full": BlockTable.of([9], first_block=2)}, "more"), 1.0)

    grant = granted(table.handle(renewed(1, known_blocks=2), 1.0))

    assert grant.num_tokens == 48
    assert grant.tables == {"full": BlockTable.of([9], first_block=2)}


def test_an_extension_that_leaves_a_gap_is_refused_and_changes_nothing() -> None:
    table = table_after(opened(sealed=False))
    gap = ev.Extended("o1", 64, {"full": BlockTable.of([9], first_block=3)}, "more")

    commands = table.handle(gap, 1.0)

    assert code_of(commands) is ErrorCode.GEOMETRY
    assert table.live["o1"].num_tokens == 32
    assert table.next_deadline() == 8.0


def test_a_box_of_the_offer_may_be_packed_under_a_live_lease() -> None:
    table = table_after(opened(), claimed())

    assert refusal_of(table, offered_box()) is None


def test_a_box_is_refused_as_soon_as_the_lease_is_over_though_nobody_said_so() -> None:
    table = table_after(opened(), claimed())
    ends_at = table.live["o1"].leases[1].expires_at

    assert refusal_of(table, offered_box(), ends_at - 0.001) is None
    assert refusal_of(table, offered_box(), ends_at) is ErrorCode.LEASE_EXPIRED
    assert refusal_of(table, offered_box(epoch=2)) is ErrorCode.STALE


@pytest.mark.parametrize(
    "pack",
    [
        offered_box(blocks=(3,)),
        offered_box(blocks=(4, 5)),
        offered_box(blocks=(3, 4), first_block=0, stop=33),
    ],
    ids=["another block", "more blocks", "more tokens"],
)
def test_a_box_of_what_the_offer_has_not_is_refused(pack: OfferedBox) -> None:
    table = table_after(opened(), claimed())

    assert refusal_of(table, pack) is ErrorCode.GEOMETRY


def test_a_box_from_before_the_first_block_of_the_offer_is_refused() -> None:
    late = altered(opened(), tables={"full": BlockTable.of([3, 4], first_block=2)}, num_tokens=64)
    table = table_after(late, claimed())

    box = offered_box(blocks=(3,), first_block=0, stop=16)

    assert refusal_of(table, box) is ErrorCode.GEOMETRY


def test_a_box_of_an_ended_offer_is_refused_with_how_it_ended() -> None:
    table = table_after(opened(), claimed(), ev.Confirmed("o1", 1, TOKEN, "confirm"))

    assert refusal_of(table, offered_box()) is ErrorCode.OFFER_COMPLETED
    assert refusal_of(table, offered_box(epoch=2)) is ErrorCode.STALE


def test_a_state_is_packed_once_the_offer_is_sealed() -> None:
    table = table_after(opened(sealed=False), claimed())
    state = offered_box(blocks=(3,), first_block=0, stop=1, opaque=True)

    early = refusal_of(table, state)
    table.handle(ev.Sealed("o1", "seal"), 1.0)
    late = refusal_of(table, state)

    assert (early, late) == (ErrorCode.OFFER_OPEN, None)


def test_one_offer_more_than_the_limit_is_refused_as_busy() -> None:
    table = table_after(opened("o1"), opened("o2"))

    commands = table.handle(opened("o3"), 0.0)

    assert code_of(commands) is ErrorCode.BUSY


def test_a_request_is_not_offered_twice_until_its_first_offer_is_released() -> None:
    again = opened("o1")
    table = table_after(opened("o1"))

    refused = table.handle(again, 0.0)
    table.handle(ev.Withdrawn("o1", None, "withdraw"), 0.0)
    accepted = table.handle(again, 0.0)

    assert code_of(refused) is ErrorCode.OFFER_EXISTS
    assert any(isinstance(c, ev.SendReply) for c in accepted)


def test_an_agent_that_drains_takes_no_new_offers_and_finishes_the_old_ones() -> None:
    table = table_after(opened("o1"), claimed(), ev.DrainStarted())

    refused = table.handle(opened("o2"), 1.0)
    confirmed = table.handle(ev.Confirmed("o1", 1, TOKEN, "confirm"), 1.0)

    assert code_of(refused) is ErrorCode.DRAINING
    assert outcomes(confirmed) == [Outcome.COMPLETED]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (ev.Confirmed("o1", 1, TOKEN, "confirm"), ErrorCode.OFFER_COMPLETED),
        (ev.Withdrawn("o1", None, "withdraw"), ErrorCode.OFFER_WITHDRAWN),
        (ev.EngineLost("engine"), ErrorCode.ENGINE_LOST),
        (ev.Stopped(), ErrorCode.DRAINING),
    ],
)
def test_a_claim_that_comes_too_late_is_told_what_became_of_the_offer(
    end: ev.Event, code: ErrorCode
) -> None:
    table = table_after(opened(), claimed(), end)

    assert code_of(table.handle(claimed(), 1.0)) is code
    assert code_of(table.handle(taken(), 1.0)) is code


WRONG_RIGHTS = {
    "claim": ev.Claimed("o1", "wrong", "reader", 2.0, "new", "claim"),
    "take": altered(taken(), secret="wrong"),
    "withdraw": ev.Withdrawn("o1", "wrong", "withdraw"),
    "renew": ev.Renewed("o1", 1, "wrong", 2.0, {}, "renew"),
    "confirm": ev.Confirmed("o1", 1, "wrong", "confirm"),
    "return": ev.Returned("o1", 1, "wrong", "return"),
    "an empty token": ev.Confirmed("o1", 1, "", "confirm"),
    "renew by another key": altered(renewed(1), holder="other"),
    "confirm by another key": ev.Confirmed("o1", 1, TOKEN, "confirm", "other"),
    "return by another key": ev.Returned("o1", 1, TOKEN, "return", "other"),
    "no ascii": ev.Confirmed("o1", 1, "t\u00f6ken", "confirm"),
}


@pytest.mark.parametrize("wrong", WRONG_RIGHTS.values(), ids=WRONG_RIGHTS)
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "open"])
def test_who_does_not_show_the_right_is_refused_without_detail_and_changes_nothing(
    wrong: ev.Event, sealed: bool
) -> None:
    table = table_after(opened(sealed=sealed), claimed())
    leases = {epoch: replace(lease) for epoch, lease in table.live["o1"].leases.items()}
    before = replace(table.live["o1"], leases=leases)

    (refusal,) = table.handle(wrong, 1.0)

    assert isinstance(refusal, ev.Refuse)
    assert (refusal.error.code, refusal.error.detail) == (ErrorCode.FORBIDDEN, {})
    assert table.live["o1"] == before
    assert table.next_deadline() == 2.0


@pytest.mark.parametrize("wrong", WRONG_RIGHTS.values(), ids=WRONG_RIGHTS)
def test_an_offer_that_has_ended_tells_nobody_without_the_right_how(wrong: ev.Event) -> None:
    table = table_after(opened(), claimed(), ev.Confirmed("o1", 1, TOKEN, "confirm"))

    commands = table.handle(wrong, 1.0)

    assert code_of(commands) is ErrorCode.FORBIDDEN


def test_a_box_is_packed_for_nobody_without_the_token() -> None:
    table = table_after(opened(), claimed())

    assert refusal_of(table, replace(offered_box(), token="wrong")) is ErrorCode.FORBIDDEN


def test_an_offer_without_a_lease_has_no_token_that_fits() -> None:
    table = table_after(opened())

    assert code_of(table.handle(ev.Confirmed("o1", 0, "", "confirm"), 1.0)) is ErrorCode.STALE
    assert table.live["o1"].outcome is None


def hand_over(table: OfferTable, offer_id: str, now: float) -> None:
    table.handle(opened(offer_id), now)
    table.handle(altered(claimed(), offer_id=offer_id), now)
    table.handle(ev.Confirmed(offer_id, 1, TOKEN, "confirm"), now)


def test_a_confirm_whose_reply_was_lost_is_answered_again_after_thousands_of_others() -> None:
    table = OfferTable()
    hand_over(table, "o1", 0.0)
    for i in range(10_000):
        hand_over(table, f"later-{i}", 1.0)

    (again,) = table.handle(ev.Confirmed("o1", 1, TOKEN, "again"), 2.0)

    assert isinstance(again, ev.SendReply)


def test_what_is_known_of_offers_that_ended_is_bounded_by_its_bytes() -> None:
    limits = replace(OfferLimits(), max_retired_bytes=50_000)
    table = OfferTable(limits)

    for i in range(100):
        hand_over(table, f"o{i}", 1.0)
        assert table.retired_bytes <= limits.max_retired_bytes

    kept = list(table.retired)
    assert kept == [f"o{i}" for i in range(100 - len(kept), 100)]
    assert table.retired_bytes == sum(one.story.kept_bytes for one in table.retired.values())
    assert 10 < len(kept) < 50


def test_what_is_known_of_offers_that_ended_is_kept_for_a_minute_and_the_last_for_longer() -> None:
    table, num_known = OfferTable(), []

    for i in range(20_000):
        hand_over(table, f"o{i}", i / 50)
        num_known.append(len(table.retired))
    for i in range(2000):
        hand_over(table, f"slow-{i}", 400.0 + i)

    assert max(num_known) == num_known[-1] == 50 * KEPT_S + 1
    assert len(table.retired) == KEPT_ANYWAY


def test_the_offers_of_a_request_are_found_as_long_as_they_are_known() -> None:
    table = OfferTable(replace(OfferLimits(), max_retired=2))
    for offer_id in ("o1", "o2", "o3"):
        table.handle(altered(opened(offer_id), request_id="r"), 1.0)
        table.handle(ev.Withdrawn(offer_id, None, "withdraw"), 1.0)
    table.handle(altered(opened("o4"), request_id="r"), 1.0)

    found = [offer.key for offer in table.named("r")]
    hand_over(table, "o5", 2.0)
    hand_over(table, "o6", 2.0)

    assert found == ["o2", "o3", "o4"]
    assert [offer.key for offer in table.named("r")] == ["o4"]
    assert not table.named("other")


def test_of_many_offers_of_one_name_the_last_are_found() -> None:
    table = OfferTable()
    for number in range(200):
        table.handle(altered(opened(f"o{number}"), request_id="r"), 1.0)
        table.handle(ev.Withdrawn(f"o{number}", None, "withdraw"), 1.0)

    found = [offer.key for offer in table.named("r")]

    assert found == [f"o{number}" for number in range(200 - len(found), 200)]
    assert 10 < len(found) < 100
