"""The fetch table, one behaviour at a time."""

import math

import pytest
from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, RemoteError, RequestRefused
from kvbus.geometry import BlockTable
from kvbus.protocol import Granted, Outcome, Rendezvous, Ticket
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.state import ENDS, FetchLimits, FetchState
from kvbus_decode.fetch.table import FetchTable
from kvbus_decode.fetch.transitions import TRANSITIONS

LIMITS = FetchLimits(max_fetches=2, max_retired=2, request_timeout_s=5.0, busy_retry_s=0.25)
TICKET = Ticket("p", "boot", "tcp://p", "engine-p", "engine-boot", "o1", "r1", 32, "secret")
MEETS = Rendezvous("transfer-id-of-32-characters-here", "tcp://p:1", request_id="r1")
PER_FETCH = (
    ev.OfferMet,
    ev.PeerReady,
    ev.TurnCame,
    ev.LeaseGranted,
    ev.StepFailed,
    ev.RenewFailed,
    ev.OfferAdvanced,
    ev.ChunkRead,
    ev.LeaseConfirmed,
    ev.CancelRequested,
    ev.PeerGone,
    ev.EngineLost,
    ev.Stopped,
    ev.DeadlinePassed,
)
READY = ev.PeerReady("f1")
READ = ev.ChunkRead("f1", 4096)
CONFIRMED = ev.LeaseConfirmed("f1")
CANCEL = ev.CancelRequested("f1", "cancel")


def requested(fetch_id: str = "f1", *, first_token: int = 0, timeout_s: float = 60.0) -> ev.Event:
    return ev.Requested(fetch_id, "engine-d", TICKET, first_token, 32, {}, timeout_s, "fetch")


def meeting(**fields: float) -> ev.Requested:
    """A fetch of an offer that has not been made."""
    event = requested(**fields)
    assert isinstance(event, ev.Requested)
    return replace(event, ticket=MEETS.unknown_ticket(), meets=MEETS)


def lease(
    *, sealed: bool = True, epoch: int = 1, first_block: int = 0, num_tokens: int = 32
) -> ev.LeaseGranted:
    tables = {"full": BlockTable.of([7], first_block=first_block)}
    return ev.LeaseGranted("f1", 0.0, Granted(epoch, 9.0, num_tokens, sealed, tables, "token"))


def failed(code: ErrorCode) -> ev.StepFailed:
    return ev.StepFailed("f1", RemoteError("it did not work", code=code))


def renew_failed(code: ErrorCode) -> ev.RenewFailed:
    return ev.RenewFailed("f1", RemoteError("it did not work", code=code))


def table_after(*events: ev.Event) -> FetchTable:
    table = FetchTable(LIMITS)
    for event in events:
        table.handle(event, 0.0)
    return table


def report(commands: list[ev.Command]) -> ev.ReportFetched:
    (found,) = (c for c in commands if isinstance(c, ev.ReportFetched))
    return found


def kinds(commands: list[ev.Command]) -> list[type[ev.Command]]:
    return [type(c) for c in commands]


def test_the_table_has_a_transition_for_every_state_and_event() -> None:
    assert set(TRANSITIONS) == {(state, kind) for state in FetchState for kind in PER_FETCH}


def test_an_ended_fetch_never_comes_back() -> None:
    assert all(
        transition.to == (state,) for (state, _), transition in TRANSITIONS.items() if state in ENDS
    )


def test_a_fetch_goes_from_resolve_to_claim_to_read_to_confirm_to_completed() -> None:
    table = table_after()

    steps = [table.handle(e, 0.0) for e in (requested(), READY, lease(), READ, CONFIRMED)]

    assert [kinds(commands) for commands in steps] == [
        [ev.SendReply, ev.ResolvePeer],
        [ev.SendClaim],
        [ev.ReadChunk],
        [ev.SendConfirm],
        [ev.ReportFetched],
    ]
    assert report(steps[-1]).outcome is Outcome.COMPLETED


def test_a_fetch_of_an_offer_that_is_not_made_asks_for_its_ticket_first() -> None:
    table = table_after()

    steps = [table.handle(e, 0.0) for e in (meeting(), ev.OfferMet("f1", TICKET), READY, lease())]

    assert [kinds(commands) for commands in steps] == [
        [ev.SendReply, ev.SendMeet],
        [ev.ResolvePeer],
        [ev.SendClaim],
        [ev.ReadChunk],
    ]
    assert steps[2][0].requested.ticket is TICKET


@pytest.mark.parametrize("code", [ErrorCode.BUSY, ErrorCode.TIMEOUT])
def test_the_ticket_is_asked_for_until_the_deadline(code: ErrorCode) -> None:
    table = table_after(meeting(timeout_s=1.0))
    num_asked, now = 1, 0.0
    while (due := table.next_deadline()) is not None:
        table.handle(failed(code), now)
        now = table.next_deadline() or due
        num_asked += kinds(table.handle(ev.DeadlinePassed(), now)).count(ev.SendMeet)

    assert num_asked == 4
    assert now == 1.0
    assert table.retired["f1"].error.code is ErrorCode.TIMEOUT


def test_who_gives_up_before_the_offer_is_made_has_it_forgone_also_later() -> None:
    table = table_after(meeting())

    (*_, forgo) = table.handle(ev.CancelRequested("f1", "a", release_offer=True), 0.0)
    (*_, again) = table.handle(ev.CancelRequested("f1", "b", release_offer=True), 0.0)

    assert forgo == again == ev.SendForgo(MEETS)


def test_a_fetch_whose_route_is_known_claims_before_it_answers() -> None:
    table = table_after()

    steps = [
        table.handle(event, 0.0)
        for event in (replace(requested(), route="known"), lease(), READ, CONFIRMED)
    ]

    assert [kinds(commands) for commands in steps] == [
        [ev.SendClaim, ev.SendReply],
        [ev.ReadChunk],
        [ev.SendConfirm],
        [ev.ReportFetched],
    ]
    assert table.find("f1").requested.route is None, "a retired fetch keeps no route alive"


def test_a_confirm_that_is_refused_fails_the_fetch_though_all_bytes_have_landed() -> None:
    table = table_after(requested(), READY, lease(), READ)

    end = report(table.handle(failed(ErrorCode.STALE), 0.0))

    assert (end.outcome, end.stage, end.blocks_free) == (Outcome.FAILED, "confirming", True)


def test_nothing_is_read_when_the_engine_has_all_tokens_and_the_offer_is_still_confirmed() -> None:
    table = table_after(requested(first_token=32), READY)

    commands = table.handle(lease(), 0.0)

    assert kinds(commands) == [ev.SendConfirm]


@pytest.mark.parametrize(
    "end",
    [
        CANCEL,
        ev.PeerGone("boot"),
        ev.EngineLost("engine-d"),
        ev.Stopped(),
        renew_failed(ErrorCode.STALE),
    ],
)
def test_a_read_that_is_given_up_is_reported_now_and_its_blocks_when_it_is_terminal(
    end: ev.Event,
) -> None:
    table = table_after(requested(), READY, lease())

    ended = table.handle(end, 0.0)
    drained = table.handle(READ, 1.0)

    assert report(ended).blocks_free is False
    assert ev.StopRead("f1") in ended
    assert kinds(drained) == [ev.SendRelease, ev.ReportBlocksFreed]
    assert not table.live


@pytest.mark.parametrize(
    "answer",
    [
        renew_failed(ErrorCode.TIMEOUT),
        renew_failed(ErrorCode.STALE),
        lease(first_block=1),
    ],
)
def test_a_renewal_that_is_answered_during_the_confirm_does_not_disturb_it(
    answer: ev.Event,
) -> None:
    table = table_after(requested(), READY, lease(), ev.OfferAdvanced("f1"), READ)

    late = table.handle(answer, 0.0)
    end = report(table.handle(CONFIRMED, 0.0))

    assert late == []
    assert end.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    "events",
    [
        (requested(),),
        (requested(), READY),
        (requested(), READY, lease(), READ),
    ],
    ids=["resolving", "claiming", "confirming"],
)
def test_only_the_engine_cancels_a_step_that_was_cancelled_on_the_way_has_failed(
    events: tuple[ev.Event, ...],
) -> None:
    table = table_after(*events)

    end = report(table.handle(failed(ErrorCode.CANCELLED), 0.0))

    assert end.outcome is Outcome.FAILED


def test_a_renewal_that_timed_out_is_sent_again_while_the_lease_lasts() -> None:
    table = table_after(requested(), READY, lease(), ev.OfferAdvanced("f1"))

    commands = table.handle(renew_failed(ErrorCode.TIMEOUT), 1.0)

    assert kinds(commands) == [ev.SendRenew]


def test_a_renewal_that_found_its_agent_busy_is_sent_again_while_the_lease_lasts() -> None:
    table = table_after(requested(), READY, lease(), ev.OfferAdvanced("f1"))

    refused = table.handle(renew_failed(ErrorCode.BUSY), 1.0)
    early = table.handle(ev.DeadlinePassed(), 1.2)
    again = table.handle(ev.DeadlinePassed(), 1.3)
    table.handle(renew_failed(ErrorCode.BUSY), 8.9)
    end = report(table.handle(ev.DeadlinePassed(), 9.0))

    assert refused == early == []
    assert kinds(again) == [ev.SendRenew]
    assert (end.error and end.error.code) is ErrorCode.LEASE_EXPIRED


def test_a_lease_that_runs_out_ends_the_read_without_waiting_for_its_renewal() -> None:
    table = table_after(requested(), READY, lease())
    table.handle(ev.DeadlinePassed(), 3.0)

    end = report(table.handle(ev.DeadlinePassed(), 9.0))

    assert (end.error and end.error.code) is ErrorCode.LEASE_EXPIRED


@pytest.mark.parametrize("hint_at", ["claiming", "renewing"])
def test_a_hint_that_overtakes_a_grant_makes_the_fetch_ask_once_more(hint_at: str) -> None:
    table = table_after(requested(), READY)
    if hint_at == "renewing":
        table.handle(lease(sealed=False, num_tokens=0), 0.0)
        table.handle(ev.OfferAdvanced("f1"), 0.0)
    news = lease(sealed=False, num_tokens=0, first_block=hint_at == "renewing")

    hinted = table.handle(ev.OfferAdvanced("f1"), 0.0)
    asked = table.handle(news, 0.0)

    assert hinted == []
    assert kinds(asked) == [ev.SendRenew]


@pytest.mark.parametrize("hint_at", ["waiting", "asking"])
def test_a_busy_offer_is_claimed_again_at_once_when_there_is_news_of_it(hint_at: str) -> None:
    """News that come while a claim is under way are newer than its refusal."""
    table = table_after(requested(), READY)
    news, refused = ev.OfferAdvanced("f1"), failed(ErrorCode.BUSY)

    first, second = (
        table.handle(event, 0.0)
        for event in ([refused, news][:: 1 if hint_at == "waiting" else -1])
    )
    third = table.handle(refused, 0.0)

    assert (kinds(first), kinds(second), kinds(third)) == ([], [ev.SendClaim], [])
    assert table.next_deadline() == pytest.approx(0.25, rel=1.0), "it is asked again without news"


def test_a_busy_offer_is_claimed_again_after_a_moment_until_the_deadline() -> None:
    table = table_after(requested(timeout_s=1.0), READY, failed(ErrorCode.BUSY))

    again = table.handle(ev.DeadlinePassed(), 0.25)
    table.handle(failed(ErrorCode.BUSY), 0.9)
    end = report(table.handle(ev.DeadlinePassed(), 1.0))

    assert kinds(again) == [ev.SendClaim]
    assert (end.error and end.error.code) is ErrorCode.TIMEOUT
    assert table.next_deadline() is None


@pytest.mark.parametrize(
    ("hint_s", "luck", "due_at"),
    [
        (1.0, 0.0, 1.0),
        (1.0, 0.5, 1.5),
        (3600.0, 0.0, 2.0),
        (-1.0, 0.0, 0.001),
        (math.nan, 0.0, 0.001),
    ],
)
def test_a_busy_offer_is_claimed_again_when_the_prefill_agent_says_or_a_little_later(
    hint_s: float, luck: float, due_at: float
) -> None:
    table = table_after(requested(timeout_s=10.0), READY)
    error = RemoteError("leased", code=ErrorCode.BUSY, retry_after_s=hint_s)

    table.handle(ev.StepFailed("f1", error, luck), 0.0)

    assert table.next_deadline() == due_at


@pytest.mark.parametrize(
    "before",
    [(READY,), (READY, lease()), (failed(ErrorCode.TIMEOUT),), (READY, CANCEL)],
    ids=["claiming", "reading", "failed", "cancelled"],
)
def test_an_engine_that_gives_up_for_good_has_the_offer_withdrawn_once(
    before: tuple[ev.Event, ...],
) -> None:
    table = table_after(requested(), *before)

    commands = table.handle(ev.CancelRequested("f1", "cancel", release_offer=True), 0.0)

    assert [c for c in commands if isinstance(c, ev.SendWithdraw)] == [ev.SendWithdraw(TICKET)]
    assert kinds(commands).count(ev.SendReply) == 1


def test_a_fetch_that_completed_has_no_offer_to_withdraw() -> None:
    table = table_after(requested(), READY, lease(), READ, CONFIRMED)

    commands = table.handle(ev.CancelRequested("f1", "cancel", release_offer=True), 0.0)

    assert kinds(commands) == [ev.SendReply]


def test_a_confirm_without_a_reply_is_asked_again_until_the_deadline_and_a_refused_one_is_not() -> (
    None
):
    table = table_after(requested(timeout_s=1.0), READY, lease(), READ)

    again = table.handle(failed(ErrorCode.TIMEOUT), 0.5)
    end = report(table.handle(failed(ErrorCode.TIMEOUT), 1.0))
    refused = table_after(requested(), READY, lease(), READ).handle(failed(ErrorCode.STALE), 0.5)

    assert kinds(again) == [ev.SendConfirm]
    assert (end.error and end.error.code) is ErrorCode.TIMEOUT
    assert report(refused).outcome is Outcome.FAILED


@pytest.mark.parametrize("late_s", [0.0, 0.99])
def test_a_yes_that_was_asked_for_by_the_deadline_completes_the_fetch_a_little_later(
    late_s: float,
) -> None:
    table = table_after(requested(timeout_s=1.0), READY, lease())
    table.handle(READ, 0.999)

    assert table.handle(ev.DeadlinePassed(), 1.0 + late_s) == []
    end = report(table.handle(CONFIRMED, 1.0 + late_s))

    assert (end.outcome, end.undecided) == (Outcome.COMPLETED, False)


def test_without_an_answer_a_fetch_fails_when_its_grace_is_over_and_a_yes_after_it_is_nothing() -> (
    None
):
    table = table_after(requested(timeout_s=1.0), READY, lease(), READ)

    end = report(table.handle(ev.DeadlinePassed(), 1.0 + LIMITS.confirm_grace_s))

    assert (end.outcome, end.stage, end.undecided) == (Outcome.FAILED, "confirming", True)
    assert table.handle(CONFIRMED, 2.5) == []


def test_a_read_that_ends_after_the_deadline_has_no_grace() -> None:
    table = table_after(requested(timeout_s=1.0), READY, lease())

    commands = table.handle(READ, 1.0)

    assert kinds(commands) == [ev.StopRead, ev.ReportFetched, ev.SendRelease, ev.ReportBlocksFreed]


@pytest.mark.parametrize(("at_s", "timeout_s"), [(3.0, 5.0), (5.5, 4.5), (8.5, 1.5)])
def test_what_is_asked_last_has_until_the_end_of_the_grace(at_s: float, timeout_s: float) -> None:
    table = table_after(requested(timeout_s=9.0), READY, lease())

    (confirm,) = (c for c in table.handle(READ, at_s) if isinstance(c, ev.SendConfirm))

    assert confirm.timeout_s == pytest.approx(timeout_s)


@pytest.mark.parametrize(
    ("end", "undecided"),
    [
        (CANCEL, True),
        (ev.PeerGone("boot"), True),
        (failed(ErrorCode.PEER_LOST), True),
        (ev.StepFailed("f1", RequestRefused("no", code=ErrorCode.LEASE_EXPIRED)), False),
    ],
    ids=["cancelled", "peer gone", "connection lost", "refused"],
)
def test_an_end_while_a_yes_is_on_its_way_leaves_open_what_became_of_the_offer(
    end: ev.Event, undecided: bool
) -> None:
    asked = table_after(requested(), READY, lease(), READ)
    reading = table_after(requested(), READY, lease())

    assert report(asked.handle(end, 0.0)).undecided == undecided
    assert not report(reading.handle(end, 0.0)).undecided


def test_a_lease_that_is_granted_after_the_end_is_given_back() -> None:
    table = table_after(requested(), READY, CANCEL)

    commands = table.handle(lease(epoch=4), 0.0)

    assert commands == [ev.SendRelease(TICKET, 4, "token", ErrorCode.CANCELLED)]


def test_blocks_in_the_grant_that_leave_a_gap_fail_the_fetch_and_give_the_lease_back() -> None:
    waiting = lease(sealed=False, num_tokens=0)
    table = table_after(requested(), READY, waiting, ev.OfferAdvanced("f1"))

    commands = table.handle(lease(first_block=5), 0.0)

    assert kinds(commands) == [ev.SendRelease, ev.ReportFetched]


def test_an_offer_that_is_sealed_with_too_few_tokens_fails_the_fetch() -> None:
    table = table_after(requested(), READY)
    short = ev.LeaseGranted("f1", 0.0, Granted(1, 9.0, 16, True, {}, "token"))

    end = report(table.handle(short, 0.0))

    assert (end.error and end.error.code) is ErrorCode.INVALID


def test_a_cancel_is_answered_ok_after_the_end_and_refused_for_an_unknown_fetch() -> None:
    table = table_after(requested(), CANCEL)

    again = table.handle(CANCEL, 0.0)
    unknown = table.handle(ev.CancelRequested("never", "cancel"), 0.0)

    assert kinds(again) == [ev.SendReply]
    assert kinds(unknown) == [ev.Refuse]


@pytest.mark.parametrize(
    ("before", "code"),
    [
        ((requested(),), ErrorCode.FETCH_EXISTS),
        ((requested(), CANCEL), ErrorCode.FETCH_EXISTS),
        ((requested("f2"), requested("f3")), ErrorCode.BUSY),
        ((ev.DrainStarted(),), ErrorCode.DRAINING),
    ],
)
def test_a_fetch_that_cannot_be_taken_is_refused_with_the_reason(
    before: tuple[ev.Event, ...], code: ErrorCode
) -> None:
    table = table_after(*before)

    (refusal,) = table.handle(requested(), 0.0)

    assert isinstance(refusal, ev.Refuse)
    assert isinstance(refusal.error, KVBusError)
    assert refusal.error.code is code


def test_a_fetch_that_drains_keeps_its_place_until_its_transfers_end() -> None:
    table = table_after(requested("f1"), READY, lease(), CANCEL, requested("f2"))

    (full,) = table.handle(requested("f3"), 0.0)
    table.handle(READ, 0.0)
    taken = table.handle(requested("f3"), 0.0)

    assert isinstance(full, ev.Refuse)
    assert full.error.code is ErrorCode.BUSY
    assert kinds(taken) == [ev.SendReply, ev.ResolvePeer]
