"""The slot table, one behaviour at a time."""

from collections.abc import Hashable

import pytest

from kvbus.errors import ErrorCode, GeometryError, SegmentError
from kvbus_prefill.slots import events as ev
from kvbus_prefill.slots.entry import TRANSITIONS, SlotLimits, SlotState
from kvbus_prefill.slots.table import SlotTable

LIMITS = SlotLimits(num_slots=4, slot_bytes=100, max_gathers=1, max_waiting=4, max_slot_lease_s=8.0)
WAITING, GATHERING, PACKED = SlotState.WAITING, SlotState.GATHERING, SlotState.PACKED
ABANDONED, WIPING, OVER = SlotState.ABANDONED, SlotState.WIPING, SlotState.OVER
ENDS = (ev.LeaseEnded, ev.EngineLost, ev.Stopped)


def asked(
    name: str,
    lease: Hashable = "lease",
    *,
    num_bytes: int = 80,
    slot_lease_s: float = 2.0,
    priority: int = 0,
) -> ev.SlotWanted:
    """The name is what is gathered, and who waits for the answer."""
    return ev.SlotWanted(lease, "reader", "engine", num_bytes, slot_lease_s, name, name, priority)


def table_after(*events: ev.Event, limits: SlotLimits = LIMITS, now: float = 0.0) -> SlotTable:
    table = SlotTable(limits)
    for event in events:
        table.handle(event, now)
    return table


def started(commands: list[ev.Command]) -> list[object]:
    return [c.work for c in commands if isinstance(c, ev.StartGather)]


def refused(commands: list[ev.Command]) -> dict[object, ErrorCode]:
    return {c.reply_to: c.error.code for c in commands if isinstance(c, ev.Refuse)}


def test_a_box_has_a_transition_for_every_event_that_can_meet_it() -> None:
    ended_by = {(s, e) for s in (WAITING, GATHERING, PACKED, ABANDONED, WIPING) for e in ENDS}
    due = {(s, ev.DeadlinePassed) for s in (WAITING, GATHERING, PACKED)}
    given = {(s, ev.GivenBack) for s in (WAITING, GATHERING, PACKED, ABANDONED, WIPING)}
    gathered = {(s, ev.GatherEnded) for s in (GATHERING, ABANDONED)}
    unanswered = {(s, ev.Abandoned) for s in (WAITING, GATHERING)}
    others = {(WAITING, ev.TurnCame), (WIPING, ev.WipeEnded)}

    assert set(TRANSITIONS) == ended_by | due | given | gathered | unanswered | others


def test_only_a_copy_that_ended_frees_the_slot_of_a_copy_that_began() -> None:
    freed = {s for (s, _), t in TRANSITIONS.items() if OVER in t.to and s is not WAITING}
    running = {(s, e) for (s, e), t in TRANSITIONS.items() if OVER in t.to}

    assert freed == {GATHERING, PACKED, ABANDONED, WIPING}
    assert {e for s, e in running if s in (GATHERING, ABANDONED)} == {ev.GatherEnded}
    assert {e for s, e in running if s is WIPING} == {ev.WipeEnded}


def test_a_box_that_nobody_waits_for_is_not_gathered() -> None:
    table = table_after(asked("a"), asked("b"), asked("c"))

    table.handle(ev.Abandoned("lease", "b"), 1.0)
    gathered_next = table.handle(ev.GatherEnded(1), 1.0)

    assert table.num_waiting == 0
    assert started(gathered_next) == ["c"]


def test_the_slot_of_a_box_that_nobody_waits_for_is_free_when_its_copy_has_ended() -> None:
    table = table_after(asked("a"))

    table.handle(ev.Abandoned("lease", "a"), 1.0)
    before = table.num_slots_in_use
    table.handle(ev.GatherEnded(1), 1.0)

    assert (before, table.num_slots_in_use) == (1, 0)


def test_a_reader_is_told_of_its_slot_when_the_copy_has_ended_and_not_before() -> None:
    table = SlotTable(LIMITS)

    first = table.handle(asked("a", slot_lease_s=100.0), 1.0)
    then = table.handle(ev.GatherEnded(1), 2.0)

    assert first == [ev.StartGather(1, 0, "a")]
    assert then == [ev.ReplyPacked("a", 1, 0, 80, 8.0)]


def test_a_copy_that_failed_is_the_failure_of_its_reader_and_frees_the_slot() -> None:
    table = table_after(asked("a"))

    commands = table.handle(ev.GatherEnded(1, SegmentError("gone")), 1.0)

    assert refused(commands) == {"a": ErrorCode.SEGMENT}
    assert table.num_slots_in_use == 0


def test_where_slots_are_wiped_the_next_gets_one_when_that_has_ended() -> None:
    limits = SlotLimits(num_slots=1, slot_bytes=100, wipe=True)
    table = table_after(asked("a"), asked("b"), ev.GatherEnded(1), limits=limits)

    given = table.handle(ev.GivenBack((1,), "reader"), 1.0)
    in_use = table.num_slots_in_use
    wiped = table.handle(ev.WipeEnded(1), 1.0)

    assert given == [ev.StartWipe(1, 0)]
    assert in_use == 1
    assert started(wiped) == ["b"]


def test_a_slot_that_is_given_back_goes_to_the_next_under_another_id() -> None:
    limits = SlotLimits(num_slots=1, slot_bytes=100)
    table = table_after(asked("a"), asked("b"), ev.GatherEnded(1), limits=limits)

    commands = table.handle(ev.GivenBack((1,), "reader"), 1.0)

    assert commands == [ev.StartGather(2, 0, "b")]


@pytest.mark.parametrize(
    "given",
    [ev.GivenBack((1,), "reader"), ev.GivenBack((3,), "reader"), ev.GivenBack((2,), "another")],
    ids=["an old id", "an id that never was", "another reader"],
)
def test_what_is_not_the_readers_to_give_back_stays_in_use(given: ev.GivenBack) -> None:
    table = table_after(asked("a"), ev.GatherEnded(1), ev.GivenBack((1,), "reader"))
    table.handle(asked("b"), 0.0)
    table.handle(ev.GatherEnded(2), 0.0)

    commands = table.handle(given, 1.0)

    assert commands == []
    assert table.num_slots_in_use == 1


def test_leases_take_turns_so_that_a_short_fetch_is_not_behind_a_long_one() -> None:
    table = table_after(asked("a1", "a"), asked("a2", "a"), asked("a3", "a"), asked("b1", "b"))

    second = table.handle(ev.GatherEnded(1), 1.0)
    third = table.handle(ev.GatherEnded(2), 1.0)

    assert started(second) + started(third) == ["a2", "b1"]


def test_a_lease_that_holds_half_of_the_slots_waits_and_others_do_not() -> None:
    table = table_after(asked("a1", "a"), ev.GatherEnded(1), asked("a2", "a"), ev.GatherEnded(2))

    third = table.handle(asked("a3", "a"), 1.0)
    other = table.handle(asked("b1", "b"), 1.0)

    assert third == []
    assert started(other) == ["b1"]


def test_the_end_of_a_lease_frees_all_its_slots_and_refuses_what_waits() -> None:
    table = table_after(asked("a1"), ev.GatherEnded(1), asked("a2"), asked("a3"))

    commands = table.handle(ev.LeaseEnded("lease", ErrorCode.OFFER_WITHDRAWN), 1.0)

    assert set(refused(commands).values()) == {ErrorCode.OFFER_WITHDRAWN}
    assert refused(commands).keys() == {"a2", "a3"}
    assert [pack.state for pack in table.live.values()] == [ABANDONED]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (ev.LeaseEnded("lease", ErrorCode.LEASE_EXPIRED), ErrorCode.LEASE_EXPIRED),
        (ev.EngineLost("engine"), ErrorCode.ENGINE_LOST),
        (ev.Stopped(), ErrorCode.CLOSED),
    ],
)
def test_a_slot_that_is_copied_into_is_free_only_when_the_copy_ends(
    end: ev.Event, code: ErrorCode
) -> None:
    limits = SlotLimits(num_slots=1, slot_bytes=100)
    table = table_after(asked("a"), limits=limits)

    ended = table.handle(end, 1.0)
    in_use = table.num_slots_in_use
    gathered = table.handle(ev.GatherEnded(1), 1.0)

    assert refused(ended) == {"a": code}
    assert in_use == 1
    assert gathered == []
    assert table.num_slots_in_use == 0


def test_the_lease_of_a_slot_counts_from_the_request_and_frees_it() -> None:
    table = table_after(asked("a", slot_lease_s=2.0))
    table.handle(ev.GatherEnded(1), 1.5)

    due = table.next_deadline()
    table.handle(ev.DeadlinePassed(), 2.0)

    assert due == 2.0
    assert table.num_slots_in_use == 0


def test_a_box_that_waited_longer_than_its_slot_lease_is_refused() -> None:
    table = table_after(asked("a", slot_lease_s=4.0), asked("b", slot_lease_s=2.0))

    commands = table.handle(ev.DeadlinePassed(), 2.0)

    assert refused(commands) == {"b": ErrorCode.TIMEOUT}
    assert table.num_waiting == 0


def test_a_box_that_is_larger_than_a_slot_is_refused_with_both_sizes() -> None:
    table = SlotTable(LIMITS)

    (refusal,) = table.handle(asked("a", num_bytes=101), 0.0)

    assert isinstance(refusal, ev.Refuse)
    assert isinstance(refusal.error, GeometryError)
    assert refusal.error.detail == {"box_bytes": 101, "slot_bytes": 100}


def test_one_box_more_than_may_wait_is_busy() -> None:
    table = table_after(*(asked(f"a{number}") for number in range(5)))

    commands = table.handle(asked("more"), 0.0)

    assert refused(commands) == {"more": ErrorCode.BUSY}
    assert table.num_waiting == 4


def test_an_agent_that_stops_packs_no_more() -> None:
    table = table_after(ev.Stopped())

    commands = table.handle(asked("a"), 0.0)

    assert refused(commands) == {"a": ErrorCode.CLOSED}


def test_an_urgent_box_is_gathered_before_those_that_wait() -> None:
    table = table_after(asked("a"), asked("b"), asked("c", "other", priority=1))

    assert started(table.handle(ev.GatherEnded(1), 1.0)) == ["c"]
