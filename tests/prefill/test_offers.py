"""The offer table: what it answers, whose lease it ends, and when it reports blocks released.

Each case is a script: events, some with the time and what must be said to them. See `said`.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace as altered

from kvbus.errors import ErrorCode, KVBusError
from kvbus.geometry import BlockTable
from kvbus.protocol import Granted, Outcome
from kvbus.table import KEPT_ANYWAY, KEPT_S
from kvbus_prefill import offer

ev = offer.events
SECRET, TOKEN = "secret", "token"
LIMITS = offer.OfferLimits(max_offers=2, max_retired=2, max_lease_s=4.0, max_hold_s=10.0)
COMPLETED, WITHDRAWN, EXPIRED = Outcome.COMPLETED, Outcome.WITHDRAWN, Outcome.EXPIRED
BUSY, STALE, FORBIDDEN = ErrorCode.BUSY, ErrorCode.STALE, ErrorCode.FORBIDDEN
OFFER_OPEN, LEASE_EXPIRED = ErrorCode.OFFER_OPEN, ErrorCode.LEASE_EXPIRED
DONE, GEOMETRY = ErrorCode.OFFER_COMPLETED, ErrorCode.GEOMETRY


def opened(offer_id: str = "o1", **changes: Any) -> ev.Opened:
    """A sealed offer of 32 tokens, with 8 s to live."""
    made = ev.Opened(
        offer_id=offer_id,
        engine_id="engine",
        request_id=f"request-{offer_id}",
        num_tokens=32,
        tables={"full": BlockTable.of([3, 4])},
        sealed=True,
        ttl_s=8.0,
        secret=SECRET,
        ticket={"offer_id": offer_id},
        reply_to="open",
    )
    return altered(made, **changes)


def claimed(
    reader_id: str = "reader", *, lease_s: float = 2.0, token: str = TOKEN, **changes: Any
) -> ev.Claimed:
    return altered(ev.Claimed("o1", SECRET, reader_id, lease_s, token, "claim"), **changes)


def renewed(epoch: int, *, lease_s: float = 2.0, known: int = 0, token: str = TOKEN) -> ev.Renewed:
    return ev.Renewed("o1", epoch, token, lease_s, {"full": known}, "renew")


def confirmed(epoch: int = 1, token: str = TOKEN, holder: str = "") -> ev.Confirmed:
    return ev.Confirmed("o1", epoch, token, "confirm", holder)


def returned(epoch: int = 1, token: str = TOKEN, holder: str = "") -> ev.Returned:
    return ev.Returned("o1", epoch, token, "return", holder)


def taken(
    reader_id: str = "reader", *, token: str = "own", blocks: tuple[int, ...] = (3, 4), **more: Any
) -> ev.Taken:
    tables = {"full": BlockTable.of(blocks)}
    return altered(ev.Taken("o1", SECRET, reader_id, token, tables, "take"), **more)


WITHDRAW, SEAL, DUE = (
    ev.Withdrawn("o1", None, "withdraw"),
    ev.Sealed("o1", "seal"),
    ev.DeadlinePassed(),
)
LOST, STOPPED = ev.EngineLost("engine"), ev.Stopped()
OPEN, SEALED = opened(sealed=False), opened()


def said(commands: list[ev.Command]) -> list[Any]:
    """A refusal is its code, a release its outcome; events that are published are left out."""
    words: list[Any] = []
    for command in commands:
        match command:
            case ev.Refuse():
                words.append(command.error.code)
            case ev.SendReply():
                words.append("ok")
            case ev.BeginLease():
                words.append(f"begin {command.epoch}")
            case ev.EndLease():
                words.append(f"end {command.epoch} {command.code}")
            case ev.ReportReleased():
                words.append(command.outcome)
    return words


def granted(commands: list[ev.Command]) -> Granted:
    (body,) = (c.body for c in commands if isinstance(c, ev.SendReply))
    assert isinstance(body, Granted)
    return body


Step = ev.Event | tuple[float, ev.Event] | tuple[float, ev.Event, list[Any]]


def play(*steps: Step, limits: offer.OfferLimits = LIMITS) -> offer.OfferTable:
    """Tell a table each event; an event alone comes when the one before did."""
    table, now = offer.OfferTable(limits), 0.0
    for step in steps:
        event, expected = step, None
        if isinstance(step, tuple):
            now, event, *rest = step
            expected = rest[0] if rest else None
        words = said(table.handle(event, now))
        assert expected is None or words == expected, (now, event)
    return table


CONFIRM_ENDS = ["ok", "end 1 offer_completed", COMPLETED]
# fmt: off
SCRIPTS: dict[str, list[Step]] = {
    # confirms
    "a confirm ends the lease before the blocks are reported released":
        [SEALED, claimed(), (1, confirmed(), CONFIRM_ENDS)],
    "a confirm whose reply was lost is answered ok again and reports nothing":
        [SEALED, claimed(), confirmed(), (1, confirmed(), ["ok"])],
    "a confirm before the seal is refused and the lease goes on":
        [OPEN, claimed(), (1, confirmed(), [OFFER_OPEN]), SEAL, (1, confirmed(), CONFIRM_ENDS)],
    "a confirm at the end of the lease is late though nobody told the time":
        [SEALED, claimed(lease_s=2.0), (2, confirmed(), ["end 1 lease_expired", LEASE_EXPIRED])],
    "a confirm of a lease that ended before another reader took the offer is stale":
        [SEALED, claimed(), returned(), taken("another"), (1, confirmed(), [STALE])],
    "an old epoch of an offer that another one completed is stale":
        [SEALED, claimed(), claimed(), confirmed(2), (1, confirmed(1), [STALE])],
    "an offer without a lease has no token that fits":
        [SEALED, (1, confirmed(0, ""), [STALE]), (1, taken(), ["ok", COMPLETED])],
    # takes
    "a take of a sealed offer that nobody has leased completes it":
        [SEALED, (1, taken(), ["ok", COMPLETED])],
    "a take whose reply was lost is answered ok again and reports nothing":
        [SEALED, taken(), (1, taken(), ["ok"])],
    "a second take by another token or key is told that the offer is completed":
        [SEALED, taken(), (1, taken(token="another"), [DONE]), (1, taken(holder="other"), [DONE])],
    "a take with the token of the last lease is told that the offer was withdrawn":
        [SEALED, claimed(), WITHDRAW, (1, taken(token=TOKEN), [ErrorCode.OFFER_WITHDRAWN])],
    "a take of an offer that was confirmed is no repeated one":
        [SEALED, claimed(), confirmed(), (1, taken(), [DONE])],
    "a take while another reader has the lease is busy until that gave it back":
        [SEALED, claimed("another"), (1, taken(), [BUSY]), returned(),
         (1, taken(), ["ok", COMPLETED])],
    "a take by who has the lease ends it before the blocks are reported released":
        [SEALED, claimed(), (1, taken(), ["ok", "end 1 stale", COMPLETED])],
    "a take with the reader's name and another key does not end its lease":
        [SEALED, claimed(), (1, taken(holder="other"), [BUSY]), (1, confirmed(), CONFIRM_ENDS)],
    "a take before the seal is refused and the offer goes on":
        [OPEN, (1, taken(), [OFFER_OPEN]), SEAL, (1, taken(), ["ok", COMPLETED])],
    "a take when the offer expires is late though nobody told the time":
        [opened(ttl_s=1.0), (1, taken(), [EXPIRED, ErrorCode.OFFER_EXPIRED])],
    # how long an offer and a lease last
    "an open offer outlives its ttl while a reader asks to take it":
        [OPEN, *[(now, taken(), [OFFER_OPEN]) for now in (7, 10, 13)], (14, SEAL),
         (14.1, taken(), ["ok", COMPLETED])],
    "a reader that asks no more keeps an open offer for a lease and no longer":
        [OPEN, (7, taken()), (7 + LIMITS.max_lease_s - 0.1, DUE, []),
         (7 + LIMITS.max_lease_s, DUE, [EXPIRED])],
    "readers that ask for ever keep an open offer as long as one may hold it":
        [OPEN,
         *[(7 + n, taken(f"reader-{n}"), [OFFER_OPEN]) for n in range(int(LIMITS.max_hold_s))],
         (7 + LIMITS.max_hold_s, taken(), [EXPIRED, ErrorCode.OFFER_EXPIRED])],
    "who has not the secret does not keep an open offer":
        [OPEN, (7, taken(secret="another"), [FORBIDDEN]), (8, DUE, [EXPIRED])],
    "a lost engine ends an open offer that a reader asks to take":
        [OPEN, (7, taken()), (9, LOST, [WITHDRAWN])],
    "a lease outlasts the time to live and the offer expires with it":
        [opened(ttl_s=1.0), claimed(lease_s=3.0), (2, DUE, []),
         (3, DUE, ["end 1 lease_expired", EXPIRED])],
    "a reader whose lease ended before its offer did is told so":
        [opened(ttl_s=1.0), claimed(lease_s=2.0), (3, DUE), (3, renewed(1), [LEASE_EXPIRED]),
         (3, claimed(), [ErrorCode.OFFER_EXPIRED])],
    "no renewal moves the end of a lease past the longest hold":
        [SEALED, claimed(lease_s=4.0),
         *[(now, renewed(1, lease_s=4.0), ["ok"]) for now in (3, 6, 9)],
         (10, DUE, ["end 1 lease_expired", EXPIRED])],
    "a reader that claims again and again holds no longer than one that renews":
        [opened(ttl_s=1.0), claimed(lease_s=4.0),
         *[(now, claimed(lease_s=4.0)) for now in (3, 6, 9)],
         (10, DUE, ["end 4 lease_expired", EXPIRED])],
    # who may read, and who must wait
    "a withdrawn offer revokes its lease before it is reported released":
        [SEALED, claimed(), (1, WITHDRAW, ["ok", "end 1 offer_withdrawn", WITHDRAWN])],
    "one offer more than the limit is busy":
        [opened("o1"), opened("o2"), (0, opened("o3"), [BUSY])],
    "a request is not offered twice until its first offer is released":
        [SEALED, (0, SEALED, [ErrorCode.OFFER_EXISTS]), WITHDRAW, (0, SEALED, ["ok"])],
    "an agent that drains takes no new offers and finishes the old ones":
        [SEALED, claimed(), ev.DrainStarted(), (1, opened("o2"), [ErrorCode.DRAINING]),
         (1, confirmed(), CONFIRM_ENDS)],
    # several readers
    "as many readers as may have a lease at once and the next waits":
        [opened(readers=2), claimed("a", token="a"), claimed("b", token="b"),
         (1, claimed("c", token="c"), [BUSY]), (1, returned(1, "a"), ["ok", "end 1 stale"]),
         (1, claimed("c", token="c"), ["ok", "begin 3"])],
    "the blocks are released when the last reader has everything":
        [opened(readers=3), claimed("a", token="a"), claimed("b", token="b"),
         (1, confirmed(2, "b"), ["ok", "end 2 offer_completed"]), (1, taken("c"), ["ok"]),
         (1, confirmed(1, "a"), CONFIRM_ENDS)],
    "who comes when all others have read is the last one":
        [opened(readers=2), taken("a"), claimed("b", token="b"),
         (1, taken("c", token="other"), [BUSY]),
         (1, confirmed(2, "b"), ["ok", "end 2 offer_completed", COMPLETED]),
         (1, claimed("c"), [DONE])],
    "a yes whose reply was lost is said again and counts once":
        [opened(readers=3), claimed("a", token="a"), confirmed(1, "a"), taken("b"),
         (1, confirmed(1, "a"), ["ok"]), (1, taken("b"), ["ok"]),
         (1, taken("c", token="other"), ["ok", COMPLETED]), (1, confirmed(1, "a"), ["ok"]),
         (1, taken("b"), ["ok"])],
    "a yes is said again after any number of readers that gave up":
        [opened(readers=2), claimed("a", token="a"), confirmed(1, "a"),
         *[step for n in range(2, 12) for step in (claimed(f"{n}", token="b"), returned(n, "b"))],
         (1, confirmed(1, "a"), ["ok"])],
    "a reader that is late does not disturb another":
        [opened(readers=2), claimed("a", token="a"), claimed("b", token="b"),
         (1, renewed(2, lease_s=4.0, token="b"), ["ok"]),
         (3, confirmed(1, "a"), ["end 1 lease_expired", LEASE_EXPIRED]),
         (3, confirmed(2, "b"), ["ok", "end 2 offer_completed"])],
    "the token of one reader is not the right of another":
        [opened(readers=2), claimed("a", token="a"), claimed("b", token="b"),
         (1, confirmed(2, "a"), [FORBIDDEN]), (1, renewed(1), [FORBIDDEN])],
    "a withdrawn offer revokes every lease before it is reported released":
        [opened(readers=2, sealed=False), claimed("a", token="a"), claimed("b", token="b"),
         (1, WITHDRAW, ["ok", "end 1 offer_withdrawn", "end 2 offer_withdrawn", WITHDRAWN]),
         (1, confirmed(1, "a"), [ErrorCode.OFFER_WITHDRAWN]),
         (1, confirmed(2, "b"), [ErrorCode.OFFER_WITHDRAWN])],
    "an offer that fewer have read than may is completed by its time to live":
        [opened(readers=2), claimed("a", token="a"), confirmed(1, "a"), (8, DUE, [COMPLETED]),
         (8, claimed("b"), [ErrorCode.OFFER_EXPIRED])],
    "a lease of any reader outlasts the time to live":
        [opened(readers=2, ttl_s=1.0), claimed("a"), (0.5, claimed("b", lease_s=4.0)),
         (2, DUE, ["end 1 lease_expired"]), (4.5, DUE, ["end 2 lease_expired", EXPIRED])],
}
# fmt: on


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_the_table_says_to_what_comes(script: list[Step]) -> None:
    play(*script)


SITUATIONS: dict[str, list[Step]] = {
    "open": [OPEN],
    "sealed": [SEALED],
    "leased": [SEALED, claimed()],
    "leased and open": [OPEN, claimed()],
    "released": [SEALED, claimed(), WITHDRAW],
}
MORE = ev.Extended("o1", 48, {"full": BlockTable.of([9], first_block=2)}, "more")
ANYTHING = [MORE, SEAL, WITHDRAW, claimed(), renewed(1), confirmed(), taken(), returned()]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_request_is_answered_once_in_every_state_and_the_end_is_final(situation: str) -> None:
    for first, second in product([*ANYTHING, LOST, STOPPED, DUE], ANYTHING):
        table = play(*SITUATIONS[situation])
        all_said = [said(table.handle(event, 1.0)) for event in (first, second)]

        for event, words in zip((first, second), all_said, strict=True):
            answers = [one for one in words if one == "ok" or isinstance(one, ErrorCode)]
            assert len(answers) == (event in ANYTHING)
        releases = [one for words in all_said for one in words if isinstance(one, Outcome)]
        assert len(releases) <= (situation != "released")
        assert ("o1" in table.live) == (not releases and situation != "released")


def test_what_was_read_out_of_other_blocks_than_those_of_the_offer_is_nothing() -> None:
    play(SEALED, (1, taken(blocks=(3, 5)), [GEOMETRY]), (1, taken(), ["ok", COMPLETED]))


LATE: dict[str, Callable[[int], ev.Event]] = {
    "renew": renewed,
    "confirm": confirmed,
    "return": returned,
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "open"])
def test_an_old_epoch_is_answered_stale_and_leaves_the_new_lease_alone(
    late: Callable[[int], ev.Event], sealed: bool
) -> None:
    table = play(opened(sealed=sealed), claimed(), claimed(), (1, late(1), [STALE]))

    assert refusal_of(table, offered_box(epoch=1)) is STALE
    assert table.num_leases() == 1
    assert table.next_deadline() == 2.0


ENDS: dict[ErrorCode, ev.Event] = {
    ErrorCode.OFFER_WITHDRAWN: WITHDRAW,
    ErrorCode.ENGINE_LOST: LOST,
    ErrorCode.DRAINING: STOPPED,
}


@pytest.mark.parametrize("code", ENDS)
@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_a_reader_is_told_what_ended_its_lease_and_never_ok(
    late: Callable[[int], ev.Event], code: ErrorCode
) -> None:
    steps: list[Step] = [SEALED, claimed(), ENDS[code]]

    table = play(*steps, (1, late(1), [code]), (1, claimed(), [code]), (1, taken(), [code]))

    assert refusal_of(table, offered_box()) is code


def test_another_reader_is_told_busy_and_when_to_come_again() -> None:
    table = play(SEALED, claimed("first", lease_s=2.0))

    for now, pause_s in (0.5, 0.25), (1.875, 0.125):
        for event in claimed("second"), taken("second"):
            (refusal,) = table.handle(event, now)
            assert isinstance(refusal, ev.Refuse)
            assert refusal.error.code is BUSY
            assert refusal.error.detail == {"retry_after_s": pause_s}


NEXT = ev.ReaderProcess("decode-0", "second boot")


def lease_of(agent_id: str, boot: str = "first boot") -> list[Step]:
    """An offer whose lease another process has, of some agent."""
    return [SEALED, claimed("before", process=ev.ReaderProcess(agent_id, boot))]


def test_the_next_process_of_a_reader_gets_what_the_one_before_had_at_once() -> None:
    claim, take = claimed("after", process=NEXT), taken("after", process=NEXT)

    play(
        *lease_of("decode-0"),
        (1, claim, ["end 1 stale", "ok", "begin 2"]),
        (1, confirmed(), [STALE]),
    )
    play(*lease_of("decode-0"), (1, take, ["ok", "end 1 stale", COMPLETED]))
    two = [claimed(name, token=name, process=ev.ReaderProcess("decode-0", "1")) for name in "ab"]
    table = play(opened(readers=2), *two, (1, claim))

    assert table.num_leases() == 1


@pytest.mark.parametrize(
    ("before", "event"),
    [
        (lease_of("decode-1"), claimed("after", process=NEXT)),
        (lease_of("decode-0", NEXT.boot), claimed("after", process=NEXT)),
        (lease_of("decode-0"), claimed("after", process=NEXT, holder="other key")),
        (lease_of("decode-0"), taken("after", process=NEXT, holder="other key")),
        (lease_of(""), claimed("after", process=ev.ReaderProcess("", "second boot"))),
    ],
    ids=["another agent", "the same process", "another key", "a take by another key", "no names"],
)
def test_who_is_not_the_next_process_of_the_reader_has_to_wait(
    before: list[Step], event: ev.Event
) -> None:
    table = play(*before, (1, event, [BUSY]))

    assert table.num_leases() == 1


def test_a_renewal_brings_only_the_blocks_that_the_reader_does_not_know() -> None:
    table = play(OPEN, claimed(), MORE)

    grant = granted(table.handle(renewed(1, known=2), 1.0))

    assert grant.num_tokens == 48
    assert grant.tables == {"full": BlockTable.of([9], first_block=2)}


def test_an_extension_that_leaves_a_gap_is_refused_and_changes_nothing() -> None:
    gap = altered(MORE, num_tokens=64, tables={"full": BlockTable.of([9], first_block=3)})
    table = play(OPEN, (1, gap, [GEOMETRY]))

    assert table.next_deadline() == 8.0
    assert granted(table.handle(claimed(), 1.0)).num_tokens == 32


def offered_box(
    epoch: int = 1,
    *,
    blocks: tuple[int, ...] = (4,),
    first_block: int = 1,
    stop: int = 32,
    opaque: bool = False,
) -> offer.OfferedBox:
    table = BlockTable.of(blocks, first_block=first_block)
    return offer.OfferedBox("o1", epoch, TOKEN, "full", table, stop, opaque)


def refusal_of(
    table: offer.OfferTable, box: offer.OfferedBox, now: float = 1.0
) -> ErrorCode | None:
    """Why a box may not be packed, None when it may; asking changes nothing."""
    before = table.num_leases(), table.next_deadline()
    try:
        table.check_box(box, now)
    except KVBusError as error:
        return error.code
    finally:
        assert (table.num_leases(), table.next_deadline()) == before
    return None


BEFORE_ALL = opened(tables={"full": BlockTable.of([3, 4], first_block=2)}, num_tokens=64)
STATE = offered_box(blocks=(3,), first_block=0, stop=1, opaque=True)


@pytest.mark.parametrize(
    ("before", "box", "now", "code"),
    [
        ([SEALED, claimed()], offered_box(), 1.999, None),
        ([SEALED, claimed()], offered_box(), 2.0, LEASE_EXPIRED),
        ([SEALED, claimed()], offered_box(epoch=2), 1.0, STALE),
        ([SEALED, claimed()], offered_box(blocks=(3,)), 1.0, GEOMETRY),
        ([SEALED, claimed()], offered_box(blocks=(4, 5)), 1.0, GEOMETRY),
        ([SEALED, claimed()], offered_box(blocks=(3, 4), first_block=0, stop=33), 1.0, GEOMETRY),
        ([SEALED, claimed()], replace(offered_box(), token="wrong"), 1.0, FORBIDDEN),
        ([BEFORE_ALL, claimed()], offered_box(blocks=(3,), first_block=0, stop=16), 1.0, GEOMETRY),
        ([SEALED, claimed(), confirmed()], offered_box(), 1.0, DONE),
        ([SEALED, claimed(), confirmed()], offered_box(epoch=2), 1.0, STALE),
        ([OPEN, claimed()], STATE, 1.0, OFFER_OPEN),
        ([OPEN, claimed(), SEAL], STATE, 1.0, None),
    ],
)
def test_a_box_is_packed_out_of_the_blocks_of_the_offer_while_the_lease_lives(
    before: list[Step], box: offer.OfferedBox, now: float, code: ErrorCode | None
) -> None:
    assert refusal_of(play(*before), box, now) is code


WRONG_RIGHTS = {
    "claim": claimed(secret="wrong", token="new"),
    "take": taken(secret="wrong"),
    "withdraw": ev.Withdrawn("o1", "wrong", "withdraw"),
    "renew": renewed(1, token="wrong"),
    "confirm": confirmed(1, "wrong"),
    "return": returned(1, "wrong"),
    "an empty token": confirmed(1, ""),
    "renew by another key": altered(renewed(1), holder="other"),
    "confirm by another key": confirmed(holder="other"),
    "return by another key": returned(holder="other"),
    "no ascii": confirmed(1, "t\u00f6ken"),
}


@pytest.mark.parametrize("wrong", WRONG_RIGHTS.values(), ids=WRONG_RIGHTS)
@pytest.mark.parametrize("situation", ["leased", "leased and open"])
def test_who_does_not_show_the_right_is_refused_without_detail_and_changes_nothing(
    wrong: ev.Event, situation: str
) -> None:
    table = play(*SITUATIONS[situation])

    (refusal,) = table.handle(wrong, 1.0)

    assert isinstance(refusal, ev.Refuse)
    assert (refusal.error.code, refusal.error.detail) == (FORBIDDEN, {})
    assert (table.num_leases(), table.next_deadline()) == (1, 2.0)
    assert granted(table.handle(renewed(1), 1.0)).num_tokens == 32
    ended = play(SEALED, claimed(), confirmed())
    assert said(ended.handle(wrong, 1.0)) == [FORBIDDEN], "it tells nobody how it ended, either"


def hand_over(table: offer.OfferTable, offer_id: str, now: float) -> None:
    for event in (opened(offer_id), claimed(), confirmed()):
        table.handle(altered(event, offer_id=offer_id), now)


def test_a_confirm_whose_reply_was_lost_is_answered_again_after_thousands_of_others() -> None:
    table = offer.OfferTable()
    hand_over(table, "o1", 0.0)
    for i in range(3000):
        hand_over(table, f"later-{i}", 1.0)

    assert said(table.handle(confirmed(), 2.0)) == ["ok"]


def test_what_is_known_of_offers_that_ended_is_bounded_by_its_bytes() -> None:
    limits = replace(offer.OfferLimits(), max_retired_bytes=50_000)
    table = offer.OfferTable(limits)

    for i in range(100):
        hand_over(table, f"o{i}", 1.0)
        assert table.retired_bytes <= limits.max_retired_bytes

    kept = list(table.retired)
    assert kept == [f"o{i}" for i in range(100 - len(kept), 100)]
    assert 10 < len(kept) < 50


def test_what_is_known_of_offers_that_ended_is_kept_for_a_minute_and_the_last_for_longer() -> None:
    table, num_known = offer.OfferTable(), []

    for i in range(3000):
        hand_over(table, f"o{i}", i / 20)
        num_known.append(len(table.retired))
    for i in range(1300):
        hand_over(table, f"slow-{i}", 400.0 + i)

    assert max(num_known) == num_known[-1] == 20 * KEPT_S + 1
    assert len(table.retired) == KEPT_ANYWAY


def test_the_last_offers_of_a_request_are_found_as_long_as_they_are_known() -> None:
    few, many = offer.OfferTable(replace(offer.OfferLimits(), max_retired=2)), offer.OfferTable()
    for table, number in ((few, 3), (many, 200)):
        for n in range(1, number + 1):
            table.handle(opened(f"o{n}", request_id="r"), 1.0)
            table.handle(altered(WITHDRAW, offer_id=f"o{n}"), 1.0)
    few.handle(opened("o4", request_id="r"), 1.0)
    found, of_many = ([offer.key for offer in table.named("r")] for table in (few, many))
    hand_over(few, "o5", 2.0)
    hand_over(few, "o6", 2.0)

    assert found == ["o2", "o3", "o4"]
    assert [offer.key for offer in few.named("r")] == ["o4"]
    assert not few.named("other")
    assert of_many == [f"o{number}" for number in range(201 - len(of_many), 201)]
    assert 10 < len(of_many) < 100
