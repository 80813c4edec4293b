"""The read table in a world with memory: bytes land late, slots are given to others at once.

Refuses to choose what happens next: the rules of the state machine on top of it do. Every block and
every slot that is free is written over in the same step, as its next owner would; so a READ or a
copy that outlives its right is seen by the bytes.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from kvbus_decode.read import events as ev
from kvbus_decode.read.entry import ReadEntry
from kvbus_decode.read.leg import Leg, Stage
from kvbus_decode.read.table import ReadLimits, ReadTable
from kvbus_decode.read.transitions import TRANSITIONS
from tests.stories import StoryMachine

LIMITS = ReadLimits(legs_in_flight=2, num_slots=3, max_retired=2, quarantine_s=6.0)
SLOT_LEASE_S = 2.0
BOX_BYTES = 10
NUM_READERS = 3
"""Ranks that a joined box is copied to, each with two blocks."""
ZEROS = "zeros"
STAGES: dict[str, tuple[Stage, ...]] = {
    "direct": (Stage.READ,),
    "reordered": (Stage.PACK, Stage.READ),
    "packed": (Stage.PACK, Stage.READ, Stage.COPY),
    "joined": (Stage.PACK, Stage.READ, Stage.COPY),
    "delegated": (Stage.DELEGATE,),
    "mapped": (Stage.COPY,),
    "zeroing": (Stage.COPY,),
    "comparing": (Stage.COMPARE,),
}


@dataclass(frozen=True)
class Box:
    """What a leg brings: ``content`` into two blocks of each reader, which no other leg has."""

    read: str
    kind: str
    blocks: tuple[int, ...]
    content: str


@dataclass
class SeenRead:
    """What was seen of one read from outside."""

    wanted: ev.ChunkWanted
    ended: ev.ChunkEnded | None = None
    num_bytes: int = 0
    stopped: bool = False
    stopped_at: float = math.inf
    num_compared: int = 0

    @property
    def boxes(self) -> list[Box]:
        return [leg.work for leg in self.wanted.legs + self.wanted.last_legs]

    @property
    def num_to_compare(self) -> int:
        return sum(box.kind == "comparing" for box in self.boxes)


@dataclass
class RemoteSlot:
    """A slot at a holder; its lease is at least as long as the reader believes."""

    leg: Leg
    content: str
    expires_at: float


@dataclass
class OwnSlot:
    """A slot of ours, and the leg that it was last given to."""

    leg: Leg
    content: str = "what was there before"


@dataclass
class Running:
    """What the agent does for legs: each waits for its answer."""

    packs: list[ev.AskPack] = field(default_factory=list)
    reads: list[ev.PostRead] = field(default_factory=list)
    copies: list[ev.StartCopy] = field(default_factory=list)
    delegates: list[ev.AskDelegate] = field(default_factory=list)
    digests: list[ev.AskDigests] = field(default_factory=list)
    compares: list[ev.StartCompare] = field(default_factory=list)

    def writers(self) -> list[Leg]:
        """Legs that may write into blocks now, whatever the table believes."""
        into_blocks = [r.leg for r in self.reads if not r.leg.needs_slot]
        return [*into_blocks, *(c.leg for c in self.copies), *(d.leg for d in self.delegates)]


class CheckedReadTable(ReadTable):
    """Every step leads to a state that the table of transitions declares."""

    def _apply_leg(self, read: ReadEntry, leg: Leg, event: object, now: float) -> list[ev.Command]:
        before = leg.state
        commands = super()._apply_leg(read, leg, event, now)
        assert leg.state in TRANSITIONS[before, type(event)].to
        return commands


class ReadWorld(StoryMachine):
    """The table, the memory of the engine, slots on both sides, and what is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.table = CheckedReadTable(LIMITS)
        self.now = 0.0
        self.num_events = 0
        self.memory: dict[int, str] = {}
        self.seen: dict[str, SeenRead] = {}
        self.running = Running()
        self.remote: dict[int, RemoteSlot] = {}
        self.own: dict[tuple[Hashable, int], OwnSlot] = {}
        self.num_slot_ids = 0
        self.aborted: set[Leg] = set()
        self.abandoned: set[Leg] = set()
        self.agent_stopped = False

    def tables(self) -> tuple[ReadTable]:
        return (self.table,)

    def make_legs(self, read: str, kinds: list[tuple[str, str, str]]) -> tuple[Leg, ...]:
        """Legs of (kind, holder, device), each with two new blocks of each rank it is for."""
        legs = []
        for number, (kind, source, device) in enumerate(kinds):
            first, num_readers = len(self.memory), NUM_READERS if kind == "joined" else 1
            num_readers = 0 if kind == "comparing" else num_readers
            blocks = tuple(range(first, first + 2 * num_readers))
            self.memory |= dict.fromkeys(blocks, "old")
            content = ZEROS if kind == "zeroing" else f"{read}, box {number}"
            box = Box(read, kind, blocks, content)
            legs.append(Leg(STAGES[kind], box, source=source, device=device))
        return tuple(legs)

    def write(self, leg: Leg, content: str, num_blocks: int | None = None) -> None:
        """Bytes arrive in the engine's blocks, in all of them or in so many."""
        box: Box = leg.work
        assert self.seen[box.read].ended is None, "bytes land in blocks that the engine has back"
        self.memory |= dict.fromkeys(box.blocks[:num_blocks], content)

    def land(self, leg: Leg, num_blocks: int | None = None) -> None:
        """What a READ brings now: out of a slot, or out of the holder's own blocks."""
        content = leg.work.content
        if Stage.PACK in leg.stages:
            content = self.remote[leg.slot_id].content if leg.slot_id in self.remote else "free"
        if leg.needs_slot:
            slot = self.own[leg.device, leg.slot]
            assert slot.leg is leg, "read into a slot that is another leg's by now"
            slot.content = content
        else:
            self.write(leg, content, num_blocks)

    def copy(self, leg: Leg, num_blocks: int | None = None) -> None:
        """What a thread copies now."""
        if Stage.READ not in leg.stages:  # zeros, or out of the holder's own blocks
            self.write(leg, leg.work.content, num_blocks)
            return
        slot = self.own[leg.device, leg.slot]
        assert slot.leg is leg, "copied out of a slot that is another leg's by now"
        self.write(leg, slot.content, num_blocks)

    def expire_remote_slots(self) -> None:
        """The holder gives the slots of ended leases to others."""
        for slot in self.remote.values():
            if slot.expires_at < self.now:
                slot.content = "another reader's box"

    def tell(self, event: ev.Event) -> list[ev.Command]:
        self.num_events += 1
        self.expire_remote_slots()
        commands = self.table.handle(event, self.now)
        with self.telling():
            for command in commands:
                self.obey(command)
            self.check_bounds()
        return commands

    def obey(self, command: ev.Command) -> None:
        match command:
            case ev.AskPack(_, leg, done):
                self.check_live(leg)
                self.take_back(done, leg.source)
                self.running.packs.append(command)
            case ev.ReleaseSlots(source, slot_ids):
                self.take_back(slot_ids, source)
            case ev.PostRead(_, leg):
                self.check_live(leg)
                if leg.needs_slot:
                    self.take_own_slot(leg)
                self.running.reads.append(command)
            case ev.StartCopy(_, leg):
                self.check_live(leg)
                self.running.copies.append(command)
            case ev.AskDelegate(_, leg):
                self.check_live(leg)
                self.running.delegates.append(command)
            case ev.AskDigests(_, leg):
                self.check_live(leg)
                self.running.digests.append(command)
            case ev.StartCompare(_, leg):
                self.check_live(leg)
                self.check_landed(self.seen[leg.work.read])
                self.running.compares.append(command)
            case ev.RecycleTransport():
                self.check_quarantine()
            case ev.AbortRead() | ev.AbortCopy() | ev.StopDelegate():
                self.check_abort(command)
            case ev.ChunkEnded():
                self.end(command)

    def check_live(self, leg: Leg) -> None:
        seen = self.seen[leg.work.read]
        assert seen.ended is None, "a stage is begun after the end"
        assert not seen.stopped, "a stage is begun after the read was stopped"

    def check_quarantine(self) -> None:
        """What other reads share is taken away for aborted ones that have drained for long."""
        since = self.now - LIMITS.quarantine_s
        reading = {r.leg.work.read for r in self.running.reads if r.leg in self.aborted}
        assert any(self.seen[read].stopped_at <= since for read in reading)

    def check_abort(self, command: ev.AbortRead | ev.AbortCopy | ev.StopDelegate) -> None:
        """Of what runs, and once."""
        running: list[Any] = {
            ev.AbortRead: self.running.reads,
            ev.AbortCopy: [*self.running.copies, *self.running.compares],
            ev.StopDelegate: self.running.delegates,
        }[type(command)]
        assert command.leg in [one.leg for one in running]
        assert command.leg not in self.aborted, "aborted twice"
        self.aborted.add(command.leg)
        seen = self.seen[command.leg.work.read]
        seen.stopped_at = min(seen.stopped_at, self.now)

    def take_back(self, slot_ids: tuple[int, ...], source: Hashable) -> None:
        """The holder has the slots again, and others write into them at once."""
        for slot_id in slot_ids:
            assert slot_id in self.remote, "given back twice, or never had"
            leg = self.remote.pop(slot_id).leg
            assert leg.source == source
            assert leg not in [r.leg for r in self.running.reads], "given back while it is read"

    def take_own_slot(self, leg: Leg) -> None:
        """The last leg that had it must be through with it."""
        assert leg.slot is not None
        assert 0 <= leg.slot < LIMITS.num_slots
        before = self.own.get((leg.device, leg.slot))
        if before is not None:
            busy = [r.leg for r in self.running.reads] + [c.leg for c in self.running.copies]
            assert before.leg not in busy, "a slot of ours is given on while it is used"
        self.own[leg.device, leg.slot] = OwnSlot(leg)

    def end(self, ended: ev.ChunkEnded) -> None:
        """The blocks are the engine's again, and it writes other things into them at once."""
        seen = self.seen[str(ended.key)]
        assert seen.ended is None, "ended twice"
        writers = [w.work.read for w in self.running.writers() if w not in self.abandoned]
        assert ended.key not in writers, "blocks are free while something can write into them"
        assert ended.num_bytes == seen.num_bytes
        comparing = [c.leg.work.read for c in self.running.compares]
        assert ended.key not in comparing, "blocks are free while they are digested"
        if ended.error is None:
            assert not seen.stopped
            assert seen.num_compared == seen.num_to_compare, "ended well before all was compared"
            self.check_landed(seen)
        seen.ended = ended
        for box in seen.boxes:
            self.memory |= dict.fromkeys(box.blocks, "the engine's next request")

    def check_landed(self, seen: SeenRead) -> None:
        for box in seen.boxes:
            assert {self.memory[b] for b in box.blocks} <= {box.content}, "wrong tokens"

    def check_bounds(self) -> None:
        packed: dict[str, int] = {}
        for leg in self.table_legs():
            if Stage.PACK in leg.stages:
                packed[leg.work.read] = packed.get(leg.work.read, 0) + 1
        assert max(packed.values(), default=0) <= LIMITS.legs_in_flight
        assert set(self.table.live) == {k for k, seen in self.seen.items() if seen.ended is None}
        assert len(self.table.retired) <= LIMITS.max_retired
        assert not any(read.wanted.legs for read in self.table.retired.values())

    def table_legs(self) -> list[Leg]:
        return [leg for read in self.table.live.values() for leg in read.live]
