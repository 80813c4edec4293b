"""The read table: the stages of each leg of a chunk, and what a chunk waits for before it ends.

Each case is a script: which legs a chunk has, then events of leg so and so, with what must be done.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus_decode import read

ev = read.events
Stage = read.Stage
LIMITS = read.ReadLimits(legs_in_flight=2, num_slots=4, max_retired=2)
ONE_SLOT = read.ReadLimits(legs_in_flight=2, num_slots=1)
PATIENT = read.ReadLimits(quarantine_s=60.0)
ABORTED = LocalError("aborted", code=ErrorCode.CANCELLED)
FAILED = RemoteError("failed", code=ErrorCode.TRANSFER_FAILED)
LOST = LocalError("gone", code=ErrorCode.ENGINE_LOST)
STAGES = {
    "direct": (Stage.READ,),
    "reordered": (Stage.PACK, Stage.READ),
    "packed": (Stage.PACK, Stage.READ, Stage.COPY),
    "mapped": (Stage.COPY,),
    "zeroing": (Stage.COPY,),
    "delegated": (Stage.DELEGATE,),
    "comparing": (Stage.COMPARE,),
}


@dataclass
class Chunk:
    """A chunk with one leg of each kind; the last ones, of ``last``, come after all others."""

    kinds: tuple[str, ...]
    last: tuple[str, ...] = ()
    key: str = "read"
    deadline: float | None = None

    def __post_init__(self) -> None:
        self.legs = [
            read.Leg(
                STAGES[kind],
                None,
                None if kind in {"zeroing", "delegated"} else "holder",
                "host" if Stage.PACK in STAGES[kind] else "",
            )
            for kind in (*self.kinds, *self.last)
        ]

    def wanted(self) -> ev.ChunkWanted:
        number = len(self.kinds)
        now, later = tuple(self.legs[:number]), tuple(self.legs[number:])
        return ev.ChunkWanted(self.key, "engine", now, later, "any", self.deadline)


def chunk(*kinds: str, **more: Any) -> Chunk:
    return Chunk(kinds, **more)


Make = Callable[[Chunk], ev.Event]


def packed(number: int, slot_id: int) -> Make:
    return lambda of: ev.SlotPacked(of.key, of.legs[number], slot_id, 2.0)


def landed(number: int = 0, num_bytes: int = 8, error: KVBusError | None = None) -> Make:
    return lambda of: ev.ReadEnded(of.key, of.legs[number], num_bytes, error)


def copied(number: int = 0, num_bytes: int = 0, error: KVBusError | None = None) -> Make:
    return lambda of: ev.CopyEnded(of.key, of.legs[number], num_bytes, error)


def delegated(number: int = 0, num_bytes: int = 5) -> Make:
    return lambda of: ev.DelegateEnded(of.key, of.legs[number], num_bytes, "direct")


def digests(number: int = 0) -> Make:
    return lambda of: ev.DigestsCame(of.key, of.legs[number])


def compared(number: int = 0, error: KVBusError | None = None) -> Make:
    return lambda of: ev.CompareEnded(of.key, of.legs[number], error)


def stopped(of: Chunk) -> ev.Event:
    return ev.ReadStopped(of.key, ABORTED)


def gone(engine: str = "engine") -> Make:
    return lambda _: ev.EngineGone(engine, LOST)


def due(_: Chunk) -> ev.Event:
    return ev.DeadlinePassed()


def ending(_: Chunk) -> ev.Event:
    return ev.Stopped()


NAMES = {
    ev.PostRead: "post",
    ev.StartCopy: "copy",
    ev.AskDelegate: "delegate",
    ev.AskDigests: "digests",
    ev.StartCompare: "compare",
    ev.AbortRead: "abort",
    ev.AbortCopy: "abort copy",
    ev.StopDelegate: "stop",
}


def done(commands: list[ev.Command], of: Chunk) -> list[str]:
    """What is done with which leg; slots that are given back; how a chunk has ended."""
    words = []
    for command in commands:
        match command:
            case ev.ReleaseSlots():
                words.append(f"release {command.slot_ids[0]}")
            case ev.RecycleTransport():
                words.append("recycle")
            case ev.ChunkEnded():
                error = "" if command.error is None else f" {command.error.code}"
                words.append(f"end {command.num_bytes} {command.path}{error}".replace("  ", " "))
            case ev.AskPack():
                back = "".join(f" giving {slot_id}" for slot_id in command.done)
                words.append(f"pack {of.legs.index(command.leg)}{back}")
            case _:
                words.append(f"{NAMES[type(command)]} {of.legs.index(command.leg)}")
    return [word.strip() for word in words]


Step = read.ReadLimits | Chunk | int | tuple[Any, ...]


def play(*steps: Step) -> read.ReadTable:
    """Ask for chunks and tell a table events of the last one, ``([now,] event, what is done)``.

    A chunk in a tuple is asked for, too; a number is how many slots of ours are in use then.
    """
    table, now, current = read.ReadTable(LIMITS), 0.0, Chunk(())
    for step in steps:
        if isinstance(step, read.ReadLimits):
            table = read.ReadTable(step)
            continue
        if isinstance(step, int):
            assert table.num_slots_in_use == step
            continue
        given = step if isinstance(step, tuple) else (step, None)
        *time, what, expected = given
        now = time[0] if time else now
        if isinstance(what, Chunk):
            current = what
        event = what.wanted() if isinstance(what, Chunk) else what(current)
        words = done(table.handle(event, now), current)
        assert expected is None or words == expected, (now, event)
    return table


# fmt: off
SCRIPTS: dict[str, list[Step]] = {
    "a direct chunk is one read a source and ends with the last":
        [(chunk("direct", "direct"), ["post 0", "post 1"]), (landed(0), []),
         (landed(1), ["end 16 any"])],
    "a chunk without legs ends at once":
        [(chunk(), ["end 0"])],
    "a packed box goes through a slot there and one of ours":
        [(chunk("packed"), ["pack 0"]), (packed(0, 7), ["post 0"]), 1,
         (landed(), ["copy 0", "release 7"]), 1, (copied(), ["end 8 any"]), 0],
    "a reordered box takes no slot of ours":
        [chunk("reordered"), (packed(0, 7), ["post 0"]), 0,
         (landed(), ["release 7", "end 8 any"])],
    "slots that were read go back with the next box of the same holder":
        [chunk("packed", "packed", "packed"), (packed(0, 7), ["post 0"]), (landed(), ["copy 0"]),
         (copied(), ["pack 2 giving 7"])],
    "no more boxes of a read are under way than may be":
        [(chunk(*["packed"] * 5), ["pack 0", "pack 1"])],
    "a box that is packed waits for a slot of ours and gets the next":
        [ONE_SLOT, chunk("packed", "packed"), (packed(0, 7), ["post 0"]), (packed(1, 8), []),
         (landed(0), ["copy 0", "release 7"]), (copied(0), ["post 1"])],
    "the tail is zeroed when everything has landed and before the end":
        [(chunk("direct", last=("zeroing",)), ["post 0"]), (landed(), ["copy 1"]),
         (copied(1), ["end 8 any"])],
    "a chunk that failed zeroes nothing":
        [chunk("direct", last=("zeroing",)), (landed(0, 0, FAILED), ["end 0 transfer_failed"])],
    "a failed leg stops the others and the chunk ends with the last writer":
        [chunk("direct", "direct"), (landed(0, 0, FAILED), ["abort 1"]),
         (landed(1, 3, ABORTED), ["end 3 any transfer_failed"])],
    "a mapped box is copied alone and counts as read":
        [(chunk("mapped"), ["copy 0"]), (copied(0, 8), ["end 8 any"])],
    "what another agent read counts as read":
        [(chunk("delegated"), ["delegate 0"]), (delegated(), ["end 5 any"])],
    # what is stopped, and what it waits for
    "a stopped read does not wait for a box, and gives its slot back":
        [chunk("packed"), (stopped, ["end 0 cancelled"]), (packed(0, 7), ["release 7"])],
    "a read fails at its deadline":
        [chunk("direct", deadline=4.0), (4, due, ["abort 0"]), (landed(0, 0), ["end 0 timeout"])],
    "an engine that is gone is not waited for at other agents":
        [chunk("direct", "delegated"), (gone(), ["abort 0", "stop 1"]),
         (landed(0, 0), ["end 0 engine_lost"])],
    "reads of another engine go on":
        [chunk("direct"), (gone("another"), []), (landed(), ["end 8 any"])],
    "an agent that stops ends what runs and begins nothing":
        [chunk("direct"), (ending, ["abort 0"]),
         (chunk("direct", key="later"), ["end 0 draining"])],
    "a key has one read at a time":
        [chunk("direct"), (chunk("direct"), ["end 0 invalid"])],
    # reads that do not end
    "reads that drain for too long have the transport recycled once for all of them":
        [PATIENT, chunk("direct", key="one"), (10, stopped, ["abort 0"]),
         chunk("direct", key="other"), (10, stopped, ["abort 0"]), (69, due, []),
         (70, due, ["recycle"]), (129, due, []), (130, due, ["recycle"]),
         (131, landed(0, 0, ABORTED), ["end 0 cancelled"])],
    "a deadline is followed by the quarantine of what was posted":
        [PATIENT, chunk("direct", deadline=5.0), (5, due, ["abort 0"]), (65, due, ["recycle"])],
    "copies need no other transport":
        [PATIENT, chunk("mapped"), (1, stopped, ["abort copy 0"]), (1000, due, [])],
    "what others read needs no other transport":
        [PATIENT, chunk("delegated"), (1, stopped, ["stop 0"]), (1000, due, [])],
    # digests
    "digests are asked for at once and ours are made when all has landed":
        [(chunk("comparing", "direct", last=("zeroing",)), ["digests 0", "post 1"]),
         (digests(), []), (landed(1), ["copy 2"]), (copied(2), ["compare 0"]),
         (compared(), ["end 8 any"])],
    "what has landed waits for the digests of its holder":
        [chunk("comparing", "comparing", "direct"), (landed(2), []), (digests(0), ["compare 0"]),
         (digests(1), ["compare 1"])],
    "a read whose bytes cannot be compared fails when they have landed":
        [chunk("comparing", "direct"), (compared(0, FAILED), ["abort 1"]),
         (landed(1), ["end 8 any transfer_failed"])],
    "a read whose bytes differ fails":
        [chunk("comparing", "direct"), (landed(1), []), (digests(), ["compare 0"]),
         (compared(0, FAILED), ["end 8 any transfer_failed"])],
    "a stopped read is not over while its blocks are digested":
        [chunk("comparing"), (digests(), ["compare 0"]), (stopped, ["abort copy 0"]),
         (compared(), ["end 0 cancelled"])],
}
# fmt: on


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_becomes_of_the_legs_of_a_chunk(script: list[Step]) -> None:
    play(*script)


def test_a_copy_of_a_stopped_read_is_cut_short_and_waited_for() -> None:
    play(
        chunk("mapped"),
        (stopped, ["abort copy 0"]),
        (copied(0, 3, ABORTED), ["end 3 any cancelled"]),
    )


ENDS: dict[str, Make] = {
    "direct": landed(),
    "mapped": copied(),
    "zeroing": copied(),
    "delegated": delegated(),
}


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("stop", [stopped, ending, due, gone("another")])
def test_what_can_write_is_over_only_when_it_was_said_to_have_ended(kind: str, stop: Make) -> None:
    one = chunk(kind, deadline=1.0)

    table = play(one, (1.0, stop, None), (1000.0, due, None))

    assert table.num_reads("engine") == 1
    assert done(table.handle(ENDS[kind](one), 1001.0), one)[0].startswith("end")
    assert table.num_reads("engine") == 0


def test_a_read_fails_a_little_before_the_lease_of_a_slot_ends_under_it() -> None:
    """The clock of the holder may be faster than ours, and it asks nobody before it goes on."""
    ends_at = 0.99 * 2.0

    def packed_at(now: float) -> list[Step]:
        return [chunk("packed"), (now, packed(0, 7), ["post 0"])]

    assert play(*packed_at(1.0)).next_deadline() == ends_at
    play(
        *packed_at(1.0),
        (ends_at, due, ["abort 0"]),
        (landed(), ["release 7", "end 8 any lease_expired"]),
        0,
    )


def test_chunks_of_one_key_have_one_story_and_keep_no_legs() -> None:
    table = play(chunk("direct"), (landed(), ["end 8 any"]), chunk("direct"), (landed(), None))

    story = "\n".join(table.story("read"))
    assert story.count("ChunkWanted -> reading") == 2
    assert "leg 0 LegDue -> reading: PostRead" in story
    assert story.count("ChunkEnded -> over") == 2
    (retired,) = table.retired.values()
    assert not [*retired.wanted.legs, *retired.live, *retired.waiting, *retired.last_legs]
