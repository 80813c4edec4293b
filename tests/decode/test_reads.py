"""The read table, one behaviour at a time."""

from typing import Any

import pytest

from kvbus.errors import ErrorCode, LocalError, RemoteError
from kvbus_decode.read import events as ev
from kvbus_decode.read.leg import Leg, LegState, Stage
from kvbus_decode.read.table import ReadLimits, ReadTable
from kvbus_decode.read.transitions import TRANSITIONS

LIMITS = ReadLimits(legs_in_flight=2, num_slots=4, max_retired=2)
ABORTED = LocalError("aborted", code=ErrorCode.CANCELLED)
FAILED = RemoteError("failed", code=ErrorCode.TRANSFER_FAILED)
WRITERS = {LegState.READING, LegState.COPYING, LegState.DELEGATED}


def direct() -> Leg:
    return Leg((Stage.READ,), None, "holder")


def reordered() -> Leg:
    return Leg((Stage.PACK, Stage.READ), None, "holder", "host")


def packed(holder: str = "holder") -> Leg:
    return Leg((Stage.PACK, Stage.READ, Stage.COPY), None, holder, "host")


def mapped() -> Leg:
    return Leg((Stage.COPY,), None, "holder")


def zeroing() -> Leg:
    return Leg((Stage.COPY,), None)


def delegated() -> Leg:
    return Leg((Stage.DELEGATE,), None)


def comparing() -> Leg:
    return Leg((Stage.COMPARE,), None, "holder")


class Drive:
    """A table, and what it said to the last event."""

    def __init__(self, limits: ReadLimits = LIMITS) -> None:
        self.table, self.now = ReadTable(limits), 0.0

    def tell(self, event: ev.Event, now: float = 0.0) -> list[ev.Command]:
        return self.table.handle(event, now)

    def want(self, *legs: Leg, key: str = "read", last: tuple[Leg, ...] = (), **more: Any) -> Any:
        return self.tell(ev.ChunkWanted(key, "engine", legs, last, path="any", **more))

    def pack(self, leg: Leg, slot_id: int, now: float = 0.0) -> list[ev.Command]:
        return self.tell(ev.SlotPacked("read", leg, slot_id, 2.0), now)

    def end_read(self, leg: Leg, num_bytes: int = 8, **more: Any) -> list[ev.Command]:
        return self.tell(ev.ReadEnded("read", leg, num_bytes, **more))


def kinds(commands: list[ev.Command]) -> list[type[Any]]:
    return [type(command) for command in commands]


def test_what_can_write_is_over_only_when_it_was_said_to_have_ended() -> None:
    ends = {
        (state, event)
        for (state, event), step in TRANSITIONS.items()
        if state in WRITERS and LegState.OVER in step.to
    }

    assert ends == {
        (LegState.READING, ev.ReadEnded),
        (LegState.COPYING, ev.CopyEnded),
        (LegState.DELEGATED, ev.DelegateEnded),
        (LegState.DELEGATED, ev.EngineGone),
    }


def test_a_direct_chunk_is_one_read_a_source_and_ends_with_the_last() -> None:
    drive, legs = Drive(), (direct(), direct())

    started, first, last = drive.want(*legs), drive.end_read(legs[0]), drive.end_read(legs[1])

    assert started == [ev.PostRead("read", legs[0]), ev.PostRead("read", legs[1])]
    assert first == []
    assert last == [ev.ChunkEnded("read", 16, "any", 0.0)]


def test_a_chunk_without_legs_ends_at_once() -> None:
    assert Drive().want() == [ev.ChunkEnded("read", 0, "", 0.0)]


def test_a_packed_box_goes_through_a_slot_there_and_one_of_ours() -> None:
    drive, leg = Drive(), packed()

    assert drive.want(leg) == [ev.AskPack("read", leg, ())]
    assert drive.pack(leg, 7) == [ev.PostRead("read", leg)]
    assert leg.slot is not None
    assert drive.end_read(leg) == [
        ev.StartCopy("read", leg),
        ev.ReleaseSlots("holder", (7,)),
    ]
    assert drive.table.num_slots_in_use == 1
    assert drive.tell(ev.CopyEnded("read", leg)) == [ev.ChunkEnded("read", 8, "any", 0.0)]
    assert drive.table.num_slots_in_use == 0


def test_a_reordered_box_takes_no_slot_of_ours() -> None:
    drive, leg = Drive(), reordered()
    drive.want(leg)

    drive.pack(leg, 7)

    assert (leg.state, leg.slot, drive.table.num_slots_in_use) == (LegState.READING, None, 0)


def test_slots_that_were_read_go_back_with_the_next_box_of_the_same_holder() -> None:
    drive, legs = Drive(), [packed() for _ in range(4)]
    drive.want(*legs)
    drive.pack(legs[0], 7)
    drive.end_read(legs[0])

    commands = drive.tell(ev.CopyEnded("read", legs[0]))

    assert commands == [ev.AskPack("read", legs[2], (7,))]


def test_no_more_boxes_of_a_read_are_under_way_than_may_be() -> None:
    drive, legs = Drive(), [packed() for _ in range(5)]

    commands = drive.want(*legs)

    assert kinds(commands) == [ev.AskPack] * LIMITS.legs_in_flight


def test_a_box_that_is_packed_waits_for_a_slot_of_ours_and_gets_the_next() -> None:
    limits = ReadLimits(legs_in_flight=2, num_slots=1)
    drive, legs = Drive(limits), [packed("a"), packed("b")]
    drive.want(*legs)
    drive.pack(legs[0], 7)

    waits = drive.pack(legs[1], 8)
    drive.end_read(legs[0])
    goes_on = drive.tell(ev.CopyEnded("read", legs[0]))

    assert (waits, legs[1].state) == ([], LegState.READING)
    assert goes_on == [ev.PostRead("read", legs[1])]


def test_the_tail_is_zeroed_when_everything_has_landed_and_before_the_end() -> None:
    drive, leg, zero = Drive(), direct(), zeroing()
    drive.want(leg, last=(zero,))

    landed = drive.end_read(leg)
    ended = drive.tell(ev.CopyEnded("read", zero), 3.0)

    assert landed == [ev.StartCopy("read", zero)]
    assert ended == [ev.ChunkEnded("read", 8, "any", 0.0)]


def test_a_chunk_that_failed_zeroes_nothing() -> None:
    drive, leg, zero = Drive(), direct(), zeroing()
    drive.want(leg, last=(zero,))

    (ended,) = drive.end_read(leg, 0, error=FAILED)

    assert ended == ev.ChunkEnded("read", 0, "", 0.0, FAILED)
    assert zero.state is LegState.WANTED


def test_a_failed_leg_stops_the_others_and_the_chunk_ends_with_the_last_writer() -> None:
    drive, legs = Drive(), (direct(), direct())
    drive.want(*legs)

    stopped = drive.end_read(legs[0], 0, error=FAILED)
    ended = drive.end_read(legs[1], 3, error=ABORTED)

    assert stopped == [ev.AbortRead(legs[1])]
    assert ended == [ev.ChunkEnded("read", 3, "any", 0.0, FAILED)]


def test_a_mapped_box_is_copied_alone_and_counts_as_read() -> None:
    drive, leg = Drive(), mapped()

    started = drive.want(leg)
    ended = drive.tell(ev.CopyEnded("read", leg, 8))

    assert started == [ev.StartCopy("read", leg)]
    assert ended == [ev.ChunkEnded("read", 8, "any", 0.0)]


def test_a_copy_of_a_stopped_read_is_cut_short_and_waited_for() -> None:
    drive, leg = Drive(), mapped()
    drive.want(leg)

    stopped = drive.tell(ev.ReadStopped("read", ABORTED))
    (ended,) = drive.tell(ev.CopyEnded("read", leg, 3, ABORTED))

    assert stopped == [ev.AbortCopy(leg)]
    assert ended == ev.ChunkEnded("read", 3, "any", 0.0, ABORTED)


@pytest.mark.parametrize("make", [direct, mapped, zeroing, delegated])
def test_a_stopped_read_waits_for_what_can_still_write(make) -> None:
    drive, leg = Drive(), make()
    drive.want(leg)

    drive.tell(ev.ReadStopped("read", ABORTED))

    assert leg.state in WRITERS
    assert drive.table.num_reads("engine") == 1


def test_a_stopped_read_does_not_wait_for_a_box_and_gives_its_slot_back() -> None:
    drive, leg = Drive(), packed()
    drive.want(leg)

    (ended,) = drive.tell(ev.ReadStopped("read", ABORTED))
    late = drive.pack(leg, 7)

    assert ended == ev.ChunkEnded("read", 0, "", 0.0, ABORTED)
    assert late == [ev.ReleaseSlots("holder", (7,))]


def test_a_read_fails_a_little_before_the_lease_of_a_slot_ends_under_it() -> None:
    """The clock of the holder may be faster than ours, and it asks nobody before it goes on."""
    drive, leg = Drive(), packed()
    drive.want(leg)
    drive.pack(leg, 7, now=1.0)

    assert drive.table.next_deadline() == 0.99 * 2.0
    aborted = drive.tell(ev.DeadlinePassed(), 0.99 * 2.0)
    ended = drive.tell(ev.ReadEnded("read", leg, 8), 2.5)

    assert aborted == [ev.AbortRead(leg)]
    assert ended[0] == ev.ReleaseSlots("holder", (7,))
    assert (ended[1].error.code, leg.slot) == (ErrorCode.LEASE_EXPIRED, None)


def test_a_read_fails_at_its_deadline() -> None:
    drive, leg = Drive(), direct()
    drive.want(leg, deadline=4.0)

    aborted = drive.tell(ev.DeadlinePassed(), 4.0)
    (ended,) = drive.end_read(leg, 0)

    assert aborted == [ev.AbortRead(leg)]
    assert ended.error.code is ErrorCode.TIMEOUT
    assert drive.table.next_deadline() is None


def test_what_another_agent_read_counts_as_read() -> None:
    drive, leg = Drive(), delegated()
    drive.want(leg)

    (ended,) = drive.tell(ev.DelegateEnded("read", leg, 5, "direct"))

    assert ended == ev.ChunkEnded("read", 5, "any", 0.0)


def test_an_engine_that_is_gone_is_not_waited_for_at_other_agents() -> None:
    drive, here, there = Drive(), direct(), delegated()
    drive.want(here, there)
    lost = LocalError("gone", code=ErrorCode.ENGINE_LOST)

    commands = drive.tell(ev.EngineGone("engine", lost))
    (ended,) = drive.end_read(here, 0)

    assert commands == [ev.AbortRead(here), ev.StopDelegate("read", there)]
    assert ended.error is lost


def test_reads_of_another_engine_go_on() -> None:
    drive, leg = Drive(), direct()
    drive.want(leg)

    assert drive.tell(ev.EngineGone("another", ABORTED)) == []
    assert drive.end_read(leg) == [ev.ChunkEnded("read", 8, "any", 0.0)]


def test_an_agent_that_stops_ends_what_runs_and_begins_nothing() -> None:
    drive, leg = Drive(), direct()
    drive.want(leg)

    stopped = drive.tell(ev.Stopped())
    (refused,) = drive.want(direct(), key="later")

    assert stopped == [ev.AbortRead(leg)]
    assert (refused.key, refused.error.code) == ("later", ErrorCode.DRAINING)


def test_a_key_has_one_read_at_a_time() -> None:
    drive = Drive()
    drive.want(direct())

    (refused,) = drive.want(direct())

    assert "under way" in refused.error.message


def test_chunks_of_one_key_have_one_story() -> None:
    drive = Drive()
    for _ in range(2):
        leg = direct()
        drive.want(leg)
        drive.end_read(leg)

    story = "\n".join(drive.table.story("read"))

    assert story.count("ChunkWanted -> reading") == 2
    assert "leg 0 LegDue -> reading: PostRead" in story
    assert story.count("ChunkEnded -> over") == 2


def test_a_read_that_is_over_keeps_no_legs() -> None:
    drive, leg = Drive(), direct()
    drive.want(leg)
    drive.end_read(leg)

    (retired,) = drive.table.retired.values()

    assert not [*retired.wanted.legs, *retired.live, *retired.waiting, *retired.last_legs]


def test_reads_that_drain_for_too_long_have_the_transport_recycled_once_for_all_of_them() -> None:
    drive = Drive(ReadLimits(quarantine_s=60.0))
    legs = [direct(), direct()]
    for number, leg in enumerate(legs):
        drive.want(leg, key=f"read {number}")
        drive.tell(ev.ReadStopped(f"read {number}", ABORTED), 10.0)

    early = drive.tell(ev.DeadlinePassed(), 69.0)
    due = drive.tell(ev.DeadlinePassed(), 70.0)
    still = drive.tell(ev.DeadlinePassed(), 129.0)
    again = drive.tell(ev.DeadlinePassed(), 130.0)
    ended = [
        drive.tell(ev.ReadEnded(f"read {number}", leg, 0, ABORTED), 131.0)
        for number, leg in enumerate(legs)
    ]

    assert (early, still) == ([], [])
    assert due == again == [ev.RecycleTransport()]
    assert [kinds(commands) for commands in ended] == [[ev.ChunkEnded]] * 2
    assert drive.table.next_deadline() is None


def test_a_deadline_is_followed_by_the_quarantine_of_what_was_posted() -> None:
    drive = Drive(ReadLimits(quarantine_s=60.0))
    drive.want(direct(), deadline=5.0)

    late = drive.tell(ev.DeadlinePassed(), 5.0)
    due = drive.tell(ev.DeadlinePassed(), 65.0)

    assert kinds(late) == [ev.AbortRead]
    assert due == [ev.RecycleTransport()]


@pytest.mark.parametrize("leg", [mapped(), delegated()])
def test_copies_and_what_others_read_need_no_other_transport(leg: Leg) -> None:
    drive = Drive(ReadLimits(quarantine_s=60.0))
    drive.want(leg)

    drive.tell(ev.ReadStopped("read", ABORTED), 1.0)

    assert drive.table.next_deadline() is None
    assert drive.tell(ev.DeadlinePassed(), 1000.0) == []


def test_digests_are_asked_for_at_once_and_ours_are_made_when_all_has_landed() -> None:
    drive, compare, read, zero = Drive(), comparing(), direct(), zeroing()

    asked = drive.want(compare, read, last=(zero,))
    known = drive.tell(ev.DigestsCame("read", compare))
    zeroed = drive.end_read(read)
    compared = drive.tell(ev.CopyEnded("read", zero))
    ended = drive.tell(ev.CompareEnded("read", compare))

    assert kinds(asked) == [ev.AskDigests, ev.PostRead]
    assert known == []
    assert kinds(zeroed) == [ev.StartCopy]
    assert compared == [ev.StartCompare("read", compare)]
    assert ended == [ev.ChunkEnded("read", 8, "any", 0.0)]


def test_what_has_landed_waits_for_the_digests_of_its_holder() -> None:
    drive, one, other, read = Drive(), comparing(), comparing(), direct()
    drive.want(one, other, read)

    landed = drive.end_read(read)
    first = drive.tell(ev.DigestsCame("read", one))
    second = drive.tell(ev.DigestsCame("read", other))

    assert landed == []
    assert first == [ev.StartCompare("read", one)]
    assert second == [ev.StartCompare("read", other)], "while the first is compared"


@pytest.mark.parametrize("lands_first", [False, True])
def test_a_read_fails_whose_bytes_cannot_be_compared_or_differ(lands_first: bool) -> None:
    drive, compare, read = Drive(), comparing(), direct()
    drive.want(compare, read)
    if lands_first:
        drive.end_read(read)
        drive.tell(ev.DigestsCame("read", compare))

    failed = drive.tell(ev.CompareEnded("read", compare, FAILED))
    if not lands_first:
        assert failed == [ev.AbortRead(read)]
        failed = drive.end_read(read)

    assert failed == [ev.ChunkEnded("read", 8, "any", 0.0, FAILED)]


def test_a_stopped_read_is_not_over_while_its_blocks_are_digested() -> None:
    drive, compare = Drive(), comparing()
    drive.want(compare)
    drive.tell(ev.DigestsCame("read", compare))

    stopped = drive.tell(ev.ReadStopped("read", ABORTED))
    ended = drive.tell(ev.CompareEnded("read", compare))

    assert stopped == [ev.AbortCopy(compare)]
    assert ended == [ev.ChunkEnded("read", 0, "", 0.0, ABORTED)]
