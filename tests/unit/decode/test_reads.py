"""The read table: the stages of each transfer of a chunk, and what a chunk waits for at its end.

Each case is a script: the transfers of a chunk, then their events, with what must be done.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus.table.events import DeadlinePassed, Stopped
from kvbus_decode import read_table as read
from kvbus_decode.fetch import events

ev = read
Stage = read.TransferState
LIMITS = read.ReadLimits(transfers_in_flight=2, num_slots=4)
ONE_SLOT = read.ReadLimits(transfers_in_flight=2, num_slots=1)
PATIENT = read.ReadLimits(quarantine_s=60.0)
ABORTED = LocalError("aborted", code=ErrorCode.CANCELLED)
FAILED = RemoteError("failed", code=ErrorCode.TRANSFER_FAILED)
LOST = LocalError("gone", code=ErrorCode.ENGINE_LOST)
STAGES = {
    "direct": (Stage.READING,),
    "staged": (Stage.QUEUED, Stage.READING, Stage.COPYING),
    "packed": (Stage.PACKING, Stage.QUEUED, Stage.READING, Stage.COPYING),
    "mapped": (Stage.COPYING,),
    "zeroing": (Stage.COPYING,),
    "comparing": (Stage.COMPARING,),
    "ordering": (Stage.ORDERING,),
}


@dataclass
class Chunk:
    """A chunk with one transfer of each kind; each ``later`` one is a round of its own."""

    kinds: tuple[str, ...]
    later: tuple[str, ...] = ()
    key: str = "read"

    def __post_init__(self) -> None:
        self.transfers = [
            read.Transfer(
                stages=STAGES[kind],
                source=None if kind == "zeroing" else "holder",
                device="host" if Stage.QUEUED in STAGES[kind] else "",
            )
            for kind in (*self.kinds, *self.later)
        ]

    def wanted(self) -> ev.ChunkWanted:
        first, later = self.transfers[: len(self.kinds)], self.transfers[len(self.kinds) :]
        return ev.ChunkWanted(self.key, "engine", (tuple(first), *((one,) for one in later)), "any")


def chunk(*kinds: str, **more: Any) -> Chunk:
    return Chunk(kinds, **more)


Make = Callable[[Chunk], ev.Event]


def ended(number: int = 0, num_bytes: int = 0, error: KVBusError | None = None, *more: Any) -> Make:
    """The stage of a transfer of the chunk has ended."""
    return lambda of: ev.StageEnded(of.transfers[number], num_bytes, error, *more)


def packed(number: int, slot_id: int) -> Make:
    return ended(number, 0, None, slot_id, 2.0)


def landed(number: int = 0, num_bytes: int = 8, error: KVBusError | None = None) -> Make:
    return ended(number, num_bytes, error)


copied = ended


def compared(number: int = 0, error: KVBusError | None = None) -> Make:
    return ended(number, 0, error)


def stopped(of: Chunk) -> ev.Event:
    return events.StopReads(of.key)


def gone(engine: str = "engine") -> Make:
    return lambda _: ev.EngineGone(engine, LOST)


def due(_: Chunk) -> ev.Event:
    return DeadlinePassed()


def ending(_: Chunk) -> ev.Event:
    return Stopped()


NAMES = {Stage.PACKING: "pack", Stage.READING: "post"}
NAMES |= {Stage.COPYING: "copy", Stage.COMPARING: "compare", Stage.ORDERING: "order"}


def done(commands: list[ev.Command], of: Chunk) -> str:
    """The commands for each transfer, the released slots, and the end of a chunk."""
    words = []
    for command in commands:
        match command:
            case ev.ReleaseSlots():
                words.append(f"release {command.slot_ids[0]}")
            case ev.ReplaceDataProcess():
                words.append("replace")
            case events.ReadEnded(path=path, error=error):
                parts = "end", f"{command.num_bytes}", path, "" if error is None else error.code
                words.append(" ".join(filter(None, parts)))
            case ev.Begin():
                back = "".join(f" giving {slot_id}" for slot_id in command.done)
                words.append(f"{NAMES[command.stage]} {of.transfers.index(command.transfer)}{back}")
            case ev.AbortTransfer():
                words.append(f"abort {of.transfers.index(command.transfer)}")
    return ", ".join(words)


Step = read.ReadLimits | Chunk | int | tuple[Any, ...]


def play(*steps: Step) -> read.ReadTable:
    """Request chunks, and handle events of the last one: ``([now,] event, what is done)``.

    A chunk in a tuple is requested, too; a number is that of our slots in use.
    """
    table, now, current = read.ReadTable(LIMITS), 0.0, Chunk(())
    for step in steps:
        if isinstance(step, read.ReadLimits):
            table = read.ReadTable(step)
        elif isinstance(step, int):
            assert table.num_slots_in_use == step
        else:
            *time, what, expected = step if isinstance(step, tuple) else (step, None)
            now = time[0] if time else now
            current = what if isinstance(what, Chunk) else current
            event = what.wanted() if isinstance(what, Chunk) else what(current)
            words = done(table.handle(event, now), current)
            assert expected is None or words == expected, (now, event)
    return table


# fmt: off
SCRIPTS: dict[str, list[Step]] = {
    "a direct chunk is one read a source and ends with the last": [
        (chunk("direct", "direct"), "post 0, post 1"), (landed(0), ""), (landed(1), "end 16 any")],
    "a chunk without transfers ends at once": [(chunk(), "end 0")],
    "a packed tile goes through a slot there and one of ours": [(chunk("packed"), "pack 0"),
        (packed(0, 7), "post 0"), 1, (landed(), "copy 0, release 7"), 1, (copied(), "end 8 any"),
        0],
    "a staged tile goes through a slot of ours alone": [ONE_SLOT,
        (chunk("staged", "staged", "staged"), "post 0"), 1, (landed(), "copy 0"), 1,
        (copied(), "post 1"), (landed(1, 0, FAILED), "end 8 any transfer_failed"), 0],
    "a staged tile that waits for a slot is over when its read is stopped": [ONE_SLOT,
        chunk("staged", "staged"), (stopped, "abort 0"),
        (landed(0, 8, ABORTED), "end 8 any cancelled"), 0],
    "slots that were read go back with the next tile of the same holder": [
        chunk("packed", "packed", "packed"), (packed(0, 7), "post 0"), (landed(), "copy 0"),
        (copied(), "pack 2 giving 7")],
    "no more tiles of a read are under way than may be": [
        (chunk(*["packed"] * 5), "pack 0, pack 1")],
    "a tile that is packed waits for a slot of ours and gets the next": [ONE_SLOT,
        chunk("packed", "packed"), (packed(0, 7), "post 0"), (packed(1, 8), ""),
        (landed(0), "copy 0, release 7"), (copied(0), "post 1")],
    "the tail is zeroed when everything has landed and before the end": [
        (chunk("direct", later=("zeroing",)), "post 0"), (landed(), "copy 1"),
        (copied(1), "end 8 any")],
    "a chunk that failed zeroes nothing": [chunk("direct", later=("zeroing",)),
        (landed(0, 0, FAILED), "end 0 transfer_failed")],
    "a failed transfer stops the others and the chunk ends with the last writer": [
        chunk("direct", "direct"), (landed(0, 0, FAILED), "abort 1"),
        (landed(1, 3, ABORTED), "end 3 any transfer_failed")],
    "a mapped tile is copied alone and counts as read": [(chunk("mapped"), "copy 0"),
        (copied(0, 8), "end 8 any")],
    "tokens that ranks elsewhere may still compute are read when all have": [
        (chunk("ordering", "ordering", later=("direct",)), "order 0, order 1"), (ended(0, 0), ""),
        (ended(1, 0), "post 2"), (landed(2), "end 8 any")],
    "nothing is read if ranks elsewhere do not compute it in time": [
        chunk("ordering", later=("direct",)), (ended(0, 0, FAILED), "end 0 transfer_failed")],
    "a stopped read does not wait for ranks elsewhere": [chunk("ordering", later=("direct",)),
        (stopped, "end 0 cancelled"), (ended(0, 0), "")],
    # what is stopped, and what it waits for
    "a stopped read does not wait for a tile, and gives its slot back": [chunk("packed"),
        (stopped, "end 0 cancelled"), (packed(0, 7), "release 7")],
    "a read of an engine that is gone is waited for": [chunk("direct"), (gone(), "abort 0"),
        (landed(0, 0), "end 0 engine_lost")],
    "a copy of a stopped read is cut short and waited for": [chunk("mapped"), (stopped, "abort 0"),
        (copied(0, 3, ABORTED), "end 3 any cancelled")],
    "a read fails a little before the lease of a slot ends under it, by a slower clock": [
        chunk("packed"), (1, packed(0, 7), "post 0"), (1.97, due, ""), (0.99 * 2.0, due, "abort 0"),
        (landed(), "release 7, end 8 any lease_expired"), 0],
    "reads of another engine go on": [chunk("direct"), (gone("another"), ""),
        (landed(), "end 8 any")],
    "an agent that stops ends what runs and begins nothing": [chunk("direct"), (ending, "abort 0"),
        (chunk("direct", key="later"), "end 0 draining")],
    "a key has one read at a time": [chunk("direct"), (chunk("direct"), "end 0 invalid")],
    # reads that do not end
    "reads that drain for too long end with the data process, once for all of them": [PATIENT,
        chunk("direct", key="one"), (10, stopped, "abort 0"), chunk("direct", key="other"),
        (stopped, "abort 0"), (69, due, ""), (70, due, "replace"), (129, due, ""),
        (130, due, "replace"), (131, landed(0, 0, ABORTED), "end 0 cancelled")],
    "a copy that does not end, as its process hangs, ends with that": [PATIENT, chunk("mapped"),
        (1, stopped, "abort 0"), (61, due, "replace"),
        (62, copied(0, 3, ABORTED), "end 3 any cancelled")],
    # digests
    "digests are made and compared when all has landed and was zeroed": [
        (chunk("direct", later=("zeroing", "comparing")), "post 0"), (landed(0), "copy 1"),
        (copied(1), "compare 2"), (compared(2), "end 8 any")],
    "a read that failed is not compared": [chunk("direct", later=("comparing",)),
        (landed(0, 0, FAILED), "end 0 transfer_failed")],
    "a read whose bytes differ fails": [chunk("direct", later=("comparing",)),
        (landed(), "compare 1"), (compared(1, FAILED), "end 8 any transfer_failed")],
    "a read of which one tile differs does not wait for the others": [
        chunk("comparing", "comparing"), (compared(1, FAILED), "end 0 transfer_failed"),
        (compared(0), "")],
    "a stopped read does not wait for digests, which write nothing": [chunk("comparing"),
        (stopped, "end 0 cancelled"), (compared(), "")],
}
# fmt: on


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_becomes_of_the_transfers_of_a_chunk(script: list[Step]) -> None:
    play(*script)


@pytest.mark.parametrize(
    ("kind", "end"), [("direct", landed()), ("mapped", copied()), ("zeroing", copied())]
)
@pytest.mark.parametrize("stop", [stopped, ending, due, gone("another")])
def test_writing_transfer_is_over_when_reported_ended(kind: str, end: Make, stop: Make) -> None:
    one = chunk(kind)
    table = play(one, (1.0, stop, None), (1000.0, due, None))
    assert table.num_reads("engine") == 1
    assert done(table.handle(end(one), 1001.0), one).startswith("end")
    assert table.num_reads("engine") == 0


def test_a_chunk_that_is_over_keeps_no_transfers() -> None:
    table = play(chunk("direct"), (landed(), "end 8 any"), chunk("direct"), (landed(), None))
    (retired,) = table.retired.values()
    assert not [*retired.wanted.rounds, *retired.live, *retired.waiting, *retired.rounds]
