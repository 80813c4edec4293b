"""The slot table under any interleaving of readers, copies, leases and time, against an oracle.

The oracle knows what became of each box as a word; it learns whose turn it was from the table, and
checks that it was fair.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvbus.errors import ErrorCode, TransferFailed
from kvbus_prefill.slots import events as ev
from kvbus_prefill.slots.entry import SlotLimits
from kvbus_prefill.slots.table import SlotTable
from tests.examples import num_examples, rarely
from tests.stories import StoryMachine

LIMITS = SlotLimits(num_slots=5, slot_bytes=100, max_gathers=2, max_waiting=8, max_slot_lease_s=4.0)
MOST_OF_A_LEASE = 2
LEASES = st.integers(0, 3)
BACK = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 5, 8])
HELD = ("gathering", "packed", "abandoned", "wiping")


@dataclass
class Box:
    """What the oracle knows of one request; leases 0 and 2 are of one engine."""

    lease: int
    ends_at: float
    state: str = "waiting"
    slot_id: int = 0
    slot: int | None = None

    @property
    def owner(self) -> int:
        return self.lease % 2


class SlotInterleavings(StoryMachine):
    """Rules are what readers, threads, leases, engines and the clock can do."""

    limits = LIMITS
    freed = "over"
    """What becomes of a box whose slot nobody uses any more."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(self.limits)
        self.now = 0.0
        self.num_events = 0
        self.stopped = False
        self.boxes: dict[int, Box] = {}
        self.answered: dict[int, ErrorCode | None] = {}
        self.slot_ids: set[int] = set()
        self.wiped: set[int] = set()
        self.overtaken: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def tables(self) -> tuple[SlotTable]:
        return (self.table,)

    # What can happen.

    @rule(
        lease=LEASES,
        num_bytes=st.sampled_from([1, 100, 100, 100, 101]),
        slot_lease_s=st.sampled_from([2.0, 2.0, 0.5, 100.0]),
    )
    def ask(self, lease: int, num_bytes: int, slot_lease_s: float) -> None:
        number = len(self.boxes)
        expected = self.age()
        box = self.boxes[number] = Box(lease, self.now + min(slot_lease_s, 4.0))
        code = self.refusal(num_bytes)
        if code is not None:
            box.state, expected[number] = "over", code
        engine, reader = f"engine-{box.owner}", f"reader-{box.owner}"
        asked = ev.SlotWanted(lease, reader, engine, num_bytes, slot_lease_s, number, number)
        self.tell(asked, expected)

    @precondition(lambda self: self.running())
    @rule(back=BACK, fails=st.sampled_from([False, False, False, True]))
    def end_gather(self, back: int, fails: bool) -> None:
        running = self.running()
        number = running[-1 - back % len(running)]
        expected, box = self.age(), self.boxes[number]
        if box.state == "gathering":
            expected[number] = ErrorCode.TRANSFER_FAILED if fails else None
        box.state = "packed" if box.state == "gathering" and not fails else self.freed
        error = TransferFailed("torn") if fails else None
        self.tell(ev.GatherEnded(box.slot_id, error), expected)

    @precondition(lambda self: self.slot_ids)
    @rule(backs=st.lists(BACK, max_size=3), owner=st.integers(0, 1), unknown=st.booleans())
    def give_back(self, backs: list[int], owner: int, unknown: bool) -> None:
        known = sorted(self.slot_ids)
        slot_ids = [known[-1 - back % len(known)] for back in backs] + [10**9] * unknown
        expected = self.age()
        for box in self.boxes.values():
            if box.slot_id in slot_ids and box.state == "packed" and box.owner == owner:
                box.state = self.freed
        self.tell(ev.GivenBack(tuple(slot_ids), f"reader-{owner}"), expected)

    @rarely(4)
    @rule(lease=LEASES)
    def end_lease(self, lease: int) -> None:
        expected = self.end_boxes(lambda box: box.lease == lease, ErrorCode.STALE)
        self.tell(ev.LeaseEnded(lease, ErrorCode.STALE), expected)
        assert not any(b.state in ("waiting", "gathering", "packed") for b in self.of(lease))

    @precondition(lambda self: self.wiping())
    @rule(back=BACK)
    def end_wipe(self, back: int) -> None:
        wiping = self.wiping()
        box = self.boxes[wiping[-1 - back % len(wiping)]]
        expected = self.age()
        box.state = "over"
        self.tell(ev.WipeEnded(box.slot_id), expected)

    @rarely(7)
    @rule(owner=st.integers(0, 1))
    def lose_engine(self, owner: int) -> None:
        expected = self.end_boxes(lambda box: box.owner == owner, ErrorCode.ENGINE_LOST)
        self.tell(ev.EngineLost(f"engine-{owner}"), expected)

    @rarely(41)
    @rule()
    def stop(self) -> None:
        self.stopped = True
        self.tell(ev.Stopped(), self.end_boxes(lambda _: True, ErrorCode.CLOSED))

    @rule(elapsed_s=st.sampled_from([0.25, 0.25, 0.5, 1.0, 5.0]))
    def pass_time_untold(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @rarely(3)
    @rule()
    def pass_time_to_the_next_deadline(self) -> None:
        self.now = max(self.now, self.table.next_deadline() or self.now)
        self.tell(ev.DeadlinePassed(), self.age())
        due = self.table.next_deadline()
        assert due is None or due > self.now, "handling what is due makes progress"

    # The oracle.

    def live(self) -> list[Box]:
        return [box for box in self.boxes.values() if box.state != "over"]

    def of(self, lease: int) -> list[Box]:
        return [box for box in self.boxes.values() if box.lease == lease]

    def wiping(self) -> list[int]:
        return [n for n, box in self.boxes.items() if box.state == "wiping"]

    def running(self) -> list[int]:
        return [n for n, box in self.boxes.items() if box.state in ("gathering", "abandoned")]

    def waiting(self) -> list[int]:
        return [n for n, box in self.boxes.items() if box.state == "waiting"]

    def num_held(self, lease: int) -> int:
        return sum(box.lease == lease and box.state in HELD for box in self.boxes.values())

    def hungry(self) -> set[int]:
        """Leases that wait and may have a slot."""
        leases = {self.boxes[number].lease for number in self.waiting()}
        return {lease for lease in leases if self.num_held(lease) < MOST_OF_A_LEASE}

    def refusal(self, num_bytes: int) -> ErrorCode | None:
        if self.stopped:
            return ErrorCode.CLOSED
        if num_bytes > LIMITS.slot_bytes:
            return ErrorCode.GEOMETRY
        full = len(self.waiting()) > LIMITS.max_waiting  # the new one is among them
        return ErrorCode.BUSY if full else None

    def age(self) -> dict[int, ErrorCode | None]:
        """End what is due by now; the answers that this gives."""
        return self.end_now(lambda box: box.ends_at <= self.now, ErrorCode.TIMEOUT)

    def end_boxes(
        self, ends: Callable[[Box], bool], code: ErrorCode
    ) -> dict[int, ErrorCode | None]:
        return self.age() | self.end_now(ends, code)

    def end_now(self, ends: Callable[[Box], bool], code: ErrorCode) -> dict[int, ErrorCode | None]:
        answers: dict[int, ErrorCode | None] = {}
        for number, box in self.boxes.items():
            if box.state in ("waiting", "gathering") and ends(box):
                answers[number] = code
                box.state = "over" if box.state == "waiting" else "abandoned"
            elif box.state == "packed" and ends(box):
                box.state = self.freed
        return answers

    # The checks.

    def tell(self, event: ev.Event, expected: dict[int, ErrorCode | None]) -> None:
        with self.telling():
            self.tell_and_check(event, expected)

    def tell_and_check(self, event: ev.Event, expected: dict[int, ErrorCode | None]) -> None:
        answers: dict[object, ErrorCode | None] = {}
        for command in self.table.handle(event, self.now):
            match command:
                case ev.StartGather():
                    self.check_turn(command)
                case ev.StartWipe(slot_id, slot):
                    (box,) = [b for b in self.boxes.values() if b.slot_id == slot_id]
                    assert (box.state, box.slot) == ("wiping", slot)
                    assert slot_id not in self.wiped, "wiped once"
                    self.wiped.add(slot_id)
                case ev.ReplyPacked(number, slot_id, slot):
                    answers[number] = None
                    box = self.boxes[number]
                    assert (box.slot_id, box.slot) == (slot_id, slot)
                case ev.Refuse(number, error):
                    assert number not in answers
                    answers[number] = error.code
        assert answers == expected
        assert not answers.keys() & self.answered.keys(), "answered once"
        self.answered |= expected
        self.num_events += 1
        for lease in set(self.overtaken) - self.hungry():
            del self.overtaken[lease]  # whoever waits again waits behind those that did meanwhile

    def check_turn(self, start: ev.StartGather) -> None:
        number = start.work
        box = self.boxes[number]
        assert start.slot_id not in self.slot_ids, "an id is never used again"
        assert start.slot not in {b.slot for b in self.live() if b.state in HELD}, "one owner"
        assert number == min(n for n in self.waiting() if self.boxes[n].lease == box.lease)
        self.check_fair(box.lease)
        self.slot_ids.add(start.slot_id)
        box.state, box.slot_id, box.slot = "gathering", start.slot_id, start.slot

    def check_fair(self, lease: int) -> None:
        """Nobody has a second turn while somebody who may have one waits for the first."""
        hungry = self.hungry()
        assert lease in hungry
        self.overtaken.pop(lease, None)
        for other in hungry - {lease}:
            self.overtaken[other][lease] += 1
            assert self.overtaken[other][lease] <= 1

    @invariant()
    def slots_are_used_as_the_oracle_says(self) -> None:
        held = [box.slot for box in self.live() if box.state in HELD]
        assert len(set(held)) == len(held) == self.table.num_slots_in_use
        assert self.table.num_waiting == len(self.waiting())
        assert len(self.running()) <= LIMITS.max_gathers

    @invariant()
    def nobody_waits_for_a_slot_that_is_free(self) -> None:
        can_start = self.table.num_slots_in_use < LIMITS.num_slots
        if can_start and len(self.running()) < LIMITS.max_gathers:
            assert not self.hungry()

    @invariant()
    def whatever_can_end_by_time_will_be_looked_at(self) -> None:
        timed = ("waiting", "gathering", "packed")
        ends = [box.ends_at for box in self.boxes.values() if box.state in timed]
        assert self.table.next_deadline() == min(ends, default=None)

    def teardown(self) -> None:
        """When every lease and every copy has ended, nothing is left and nobody waits."""
        for lease in range(4):
            expected = self.end_boxes(lambda box, lease=lease: box.lease == lease, ErrorCode.STALE)
            self.tell(ev.LeaseEnded(lease, ErrorCode.STALE), expected)
        while running := self.running():
            self.boxes[running[0]].state = self.freed
            self.tell(ev.GatherEnded(self.boxes[running[0]].slot_id), {})
        while wiping := self.wiping():
            self.end_wipe(0)
            assert len(self.wiping()) < len(wiping)

        assert self.answered.keys() == self.boxes.keys()
        assert self.table.num_slots_in_use == self.table.num_waiting == 0
        table = self.table
        for left in (table.live, table._leases, table._pool._num_held, table._pool._waiting):
            assert not left
        assert table.next_deadline() is None


class WipedSlotInterleavings(SlotInterleavings):
    """The same where slots are zeroed before they are free."""

    limits = replace(LIMITS, wipe=True)
    freed = "wiping"


TestSlotInterleavings = SlotInterleavings.TestCase
TestWipedSlotInterleavings = WipedSlotInterleavings.TestCase
TestSlotInterleavings.settings = settings(
    deadline=None, max_examples=num_examples(200), stateful_step_count=50
)
TestWipedSlotInterleavings.settings = TestSlotInterleavings.settings
