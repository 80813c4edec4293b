"""All reads of one decode agent: the legs of each, slots here, and how a read ends (sans-IO).

    ChunkWanted ─▶ legs ─▶ at most so many with slots at a time ─▶ ... ─▶ next round ─▶ ReadEnded
                              │ ▲
                              ▼ │ slots here, holder by holder in fair turn

A leg goes through its stages, one after the other:

    direct       wanted ────────────────────────▶ reading ─────────────▶ over
    staged       wanted ────────────▶ queued ───▶ reading ─▶ copying ──▶ over
    packed       wanted ─▶ packing ─▶ queued ───▶ reading ─▶ copying ──▶ over
    mapped       wanted ───────────────────────────────────▶ copying ──▶ over
    zeroing      wanted ───────────────────────────────────▶ copying ──▶ over
    comparing    wanted ─▶ comparing ──────────────────────────────────▶ over

What may write into the engine's blocks is reading (unless into a slot here) or copying. Such a
leg is never over before the data process has said that it ended, or has ended itself: NIXL and a
thread cannot be called back.
All others are over as soon as they are stopped. So `ReadEnded` is the one place where blocks
become free, whatever was aborted, lost or late before.

The legs of a read come in rounds: those that bring bytes, those that zero, and those that compare,
so these see what the read leaves in the blocks.

One READ that feeds several of our ranks is a leg with a slot, whose copy writes to all of them. So
its slot here is given on when none of them is copied to any more.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, Optional

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus.table import FairPool, Key, Story, Table, transitions
from kvbus.table.events import DeadlinePassed, Stopped, Value
from kvbus_decode.fetch.events import ReadEnded, StopReads

USABLE_SHARE = 0.99
"""Of the lease of a slot: its holder counts by another clock, and ours may be the slower one. The
lease of an offer needs no such share: whether it has ended is asked. Of a slot it is not: what a
READ found there too late would be taken for good.
"""


class LegState(StrEnum):
    """Where a leg is; packing, reading, copying and comparing are its stages."""

    WANTED = "wanted"
    """Its turn has not come: as many legs of its read are under way as may be."""

    PACKING = "packing"
    """Its holder was asked to gather the box into a slot there."""

    QUEUED = "queued"
    """It waits for a slot here; a box that was packed lies in a slot there."""

    READING = "reading"
    """A READ is planned or posted."""

    COPYING = "copying"
    """Threads copy into the engine's blocks: out of a slot here, mapped memory, or zeros."""

    COMPARING = "comparing"
    """Its holder and threads here make digests of the box."""

    OVER = "over"
    """Nothing of it can write anywhere."""


WANTED, PACKING, QUEUED = LegState.WANTED, LegState.PACKING, LegState.QUEUED
READING, COPYING = LegState.READING, LegState.COPYING
COMPARING, OVER = LegState.COMPARING, LegState.OVER


@dataclass(slots=True, eq=False, kw_only=True)
class Leg:
    """One leg; ``work`` is what carries out its stages, and means nothing here.

    It goes through ``stages``, of which ``num_begun`` were begun; between the first and the last of
    them it is one of the ``read``. ``source`` is the holder's agent, ``device`` where the slots
    here are that it reads into. ``slot_id`` names the slot there while it is the leg's, ``slot`` is
    the number of the one here.
    """

    stages: tuple[LegState, ...]
    work: Any = None
    source: Hashable = None
    device: Hashable = None
    number: int = 0
    read: Optional["ReadEntry"] = None
    state: LegState = WANTED
    num_begun: int = 0
    asked_at: float = 0.0
    slot_id: int | None = None
    slot_expires_at: float | None = None
    slot: int | None = None


class ChunkWanted(Value, frozen=True):
    """Read a chunk into the blocks of ``engine``, by legs in rounds.

    The first ones bring the bytes; the next round begins when all legs of one are over. ``path``
    and ``nixl_agent`` are only passed on to `ReadEnded`. Legs of a greater ``priority`` are given
    slots here first.
    """

    key: str
    engine: Hashable
    rounds: tuple[tuple[Leg, ...], ...]
    path: str = ""
    priority: int = 0
    nixl_agent: str = ""


class StageEnded(Value, frozen=True):
    """The stage that a leg is in has ended, whatever became of it; said once.

    After reading and copying nothing writes for it any more. ``num_bytes`` were read. A box that
    was packed lies in slot ``slot_id`` at its holder, for ``slot_lease_s`` since it was asked for.
    """

    leg: Leg
    num_bytes: int = 0
    error: KVBusError | None = None
    slot_id: int | None = None
    slot_lease_s: float = 0.0


class EngineGone(Value, frozen=True):
    """The engine whose blocks are written is lost."""

    engine: Hashable
    error: KVBusError


class LegDue(Value, frozen=True):
    """The leg may start, or go on with a slot here; the table itself says when."""

    slot: int | None = None


class LegStopped(Value, frozen=True):
    """The read of the leg has failed or was stopped; the table itself says so."""


Event = ChunkWanted | StageEnded | StopReads | EngineGone | Stopped | DeadlinePassed


class Begin(Value, frozen=True):
    """Begin ``stage`` of the leg; answer `StageEnded`, once.

    ``done`` are slots at its holder that are read, and come back with a request to pack.
    """

    leg: Leg
    stage: LegState
    done: tuple[int, ...] = ()


class Abort(Value, frozen=True):
    """Begin no further part of what the leg is at; `StageEnded` follows when nothing runs."""

    leg: Leg


class ReleaseSlots(Value, frozen=True):
    """Give slots back to their holder; when that fails their lease ends by itself."""

    source: Any
    slot_ids: tuple[int, ...]


class ReplaceDataProcess(Value, frozen=True):
    """Aborted stages do not end: end the process that does them; `StageEnded` follows for each."""


Command = Begin | Abort | ReleaseSlots | ReplaceDataProcess | ReadEnded
Commands = list[Command]


@dataclass(slots=True, eq=False)
class ReadEntry:
    """One read; ``live`` are the legs that were started and are not over.

    ``waiting`` are legs that wait for their turn, ``read_slots`` slots of each source that are read
    and go back with the next request to it. With an ``error`` it drains; what has not ended at
    ``replace_at`` never ends by itself.
    """

    wanted: ChunkWanted
    story: Story = field(default_factory=Story)
    live: dict[Leg, None] = field(default_factory=dict)
    waiting: deque[Leg] = field(default_factory=deque)
    rounds: deque[tuple[Leg, ...]] = field(init=False)
    read_slots: dict[Hashable, list[int]] = field(default_factory=dict)
    num_bytes: int = 0
    error: KVBusError | None = None
    replace_at: float | None = None
    is_over: bool = False
    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.key, self.rounds = self.wanted.key, deque(self.wanted.rounds)

    @property
    def state(self) -> str:
        return "over" if self.is_over else "reading" if self.error is None else "draining"

    @property
    def due_at(self) -> float | None:
        """The end of the first lease of a slot that is still to be read; fetches have deadlines.

        While it drains, the end of our patience with what is in flight.
        """
        if self.replace_at is not None:
            return self.replace_at
        times = [leg.slot_expires_at for leg in self.live if leg.slot_expires_at is not None]
        return min(times, default=None)

    def turn_of(self, leg: Leg) -> Key:
        """What one of its legs waits for a slot here under."""
        return Key(leg.source, self.wanted.priority)

    def next_leg(self, most_queued: int) -> Leg | None:
        """The leg to start now, taken from those that wait; so many with slots live at a time."""
        while not self.waiting and not self.live and self.rounds and self.error is None:
            self.waiting.extend(self.rounds.popleft())
        if not self.waiting:
            return None
        if QUEUED in self.waiting[0].stages:
            num_queued = sum(QUEUED in leg.stages for leg in self.live)
            if num_queued >= most_queued:
                return None
        return self.waiting.popleft()

    def release_slots(self) -> Commands:
        """Give back the slots that were read of sources to which no further request goes."""
        asked = {leg.source for leg in self.waiting}
        sources = [source for source in self.read_slots if source not in asked]
        return [ReleaseSlots(source, tuple(self.read_slots.pop(source))) for source in sources]

    def retire(self) -> None:
        """Keep no engine, no error with its frames, and no legs, which hold memory."""
        self.wanted, self.error = ChunkWanted(self.key, None, ()), None
        self.rounds.clear()


def begin(read: ReadEntry, leg: Leg, event: object, now: float) -> Commands:
    """Its next stage: it is its turn, a slot here is free, or the stage before has ended."""
    if isinstance(event, LegDue):
        leg.slot = event.slot
    leg.state = leg.stages[leg.num_begun]
    leg.num_begun += 1
    if leg.state is QUEUED:
        return []
    if leg.state is not PACKING:
        return [Begin(leg, leg.state)]
    leg.asked_at = now
    return [Begin(leg, PACKING, tuple(read.read_slots.pop(leg.source, ())))]


def go_on(read: ReadEntry, leg: Leg, event: StageEnded, now: float) -> Commands:
    """A stage has ended: the next one, if nothing of the read has failed; or the leg is over.

    Had the lease of a slot ended before its READ, so would the read have.
    """
    read.num_bytes += event.num_bytes
    read.error = read.error or event.error
    if event.slot_id is not None:
        leg.slot_id = event.slot_id
        leg.slot_expires_at = leg.asked_at + USABLE_SHARE * event.slot_lease_s
    if read.error is not None or leg.num_begun == len(leg.stages):
        leg.state = OVER
        return []
    return begin(read, leg, event, now)


def drop(_read: ReadEntry, leg: Leg, _event: LegStopped, _now: float) -> Commands:
    """Nothing writes for it, so it is over at once."""
    leg.state = OVER
    return []


def abort(_read: ReadEntry, leg: Leg, _event: LegStopped, _now: float) -> Commands:
    """NIXL cannot take back what was posted, and a thread finishes the part that it is at."""
    return [Abort(leg)]


TRANSITIONS = transitions(
    ((WANTED,), (LegDue,), begin, (PACKING, QUEUED, READING, COPYING, COMPARING)),
    ((PACKING,), (StageEnded,), go_on, (QUEUED, OVER)),
    ((QUEUED,), (LegDue,), begin, (READING,)),
    ((READING,), (StageEnded,), go_on, (COPYING, OVER)),
    ((COPYING, COMPARING), (StageEnded,), go_on, (OVER,)),
    ((PACKING, QUEUED, COMPARING), (LegStopped,), drop, (OVER,)),
    ((READING, COPYING), (LegStopped,), abort, ()),
)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Bounds of the table: legs of a read with slots at a time, and slots here on each device.

    What drains for ``quarantine_s`` is ended from outside.
    """

    legs_in_flight: int = 4
    num_slots: int = 16
    quarantine_s: float = 10.0
    max_retired_bytes: int = 4 << 20


class ReadTable(Table[str, ReadEntry, ReadLimits, Command]):
    """All reads by key; retired ones keep their story, and one of the same key goes on with it."""

    def __init__(self, limits: ReadLimits) -> None:
        super().__init__(limits, max_retired_bytes=limits.max_retired_bytes)
        self.stopped = False
        # A holder that stopped while it is read keeps half of the slots at most, the next such one
        # half of the rest, and so on: none takes all.
        self._pools: defaultdict[Hashable, FairPool[Leg]] = defaultdict(
            lambda: FairPool(limits.num_slots, may_have=lambda held, free: held < free)
        )

    @property
    def num_slots_in_use(self) -> int:
        """Slots here that are read into or copied from."""
        return sum(pool.num_in_use for pool in self._pools.values())

    def num_reads(self, engine: Hashable) -> int:
        """Reads that can still write into the engine's blocks."""
        return sum(read.wanted.engine == engine for read in self.live.values())

    def _handle(self, event: Event, now: float) -> Commands:
        reads, error = list[ReadEntry](), KVBusError("the read was stopped")
        match event:
            case StageEnded():
                return self._end_stage(event, now)
            case ChunkWanted():
                return self._start(event, now)
            case StopReads(key):
                reads = [self.live[key]] if key in self.live else []
                error = LocalError("the read was aborted", code=ErrorCode.CANCELLED)
            case EngineGone(engine, error):
                reads = [read for read in self.live.values() if read.wanted.engine == engine]
            case Stopped():
                self.stopped = True
                reads, error = list(self.live.values()), _stopped()
        return self._stop(reads, error, now)

    def _end_stage(self, event: StageEnded, now: float) -> Commands:
        """A leg that is over wants nothing; but a slot that is packed for it has to go back."""
        leg, slot_id = event.leg, event.slot_id
        if (read := leg.read) is not None:
            return self._apply_leg(leg, event, now) + self._go_on(read, now)
        return [] if slot_id is None else [ReleaseSlots(leg.source, (slot_id,))]

    def _start(self, wanted: ChunkWanted, now: float) -> Commands:
        if self.stopped or wanted.key in self.live:
            error = _stopped() if self.stopped else LocalError("the read is under way")
            return [ReadEnded(wanted.key, 0, error)]
        for number, leg in enumerate(chain.from_iterable(wanted.rounds)):
            leg.number = number
        read = ReadEntry(wanted)
        if (before := self._forget(wanted.key)) is not None:
            read.story = before.story
        self._add(read, wanted, now, ())
        return self._go_on(read, now)

    def _stop(self, reads: Iterable[ReadEntry], error: KVBusError, now: float) -> Commands:
        """Nothing new of them starts, what is in flight ends."""
        commands: Commands = []
        for read in reads:
            read.error = read.error or error
            commands += self._go_on(read, now)
        return commands

    def _go_on(self, read: ReadEntry, now: float) -> Commands:
        """Start what may start or, once it has failed, stop its legs; end it when none is left."""
        commands: Commands = []
        if read.error is not None and read.replace_at is None:
            read.replace_at = now + self.limits.quarantine_s
            read.waiting.clear()
            for leg in list(read.live):
                commands += self._apply_leg(leg, LegStopped(), now)
        while (due := read.next_leg(self.limits.legs_in_flight)) is not None:
            due.read, read.live[due] = read, None
            commands += self._apply_leg(due, LegDue(), now)
        for pool in self._pools.values():
            while (granted := pool.acquire()) is not None:
                leg, slot = granted
                commands += self._apply_leg(leg, LegDue(slot), now)
        if read.read_slots:
            commands += read.release_slots()
        if not read.waiting and not read.live and not read.is_over:
            read.is_over = True
            wanted, ended = read.wanted, ReadEnded(read.key, read.num_bytes, read.error)
            if read.num_bytes:
                ended = replace(ended, path=wanted.path, nixl_agent=wanted.nixl_agent)
            read.story.note(now, ended, read.state, ())
            self._retire(read)
            commands.append(ended)
        self.deadlines.set(read.key, None if read.is_over else read.due_at)
        return commands

    def _apply_leg(self, leg: Leg, event: object, now: float) -> Commands:
        """Apply ``event`` to a live leg, and account what it holds.

        That is a place in the queue for a slot here, such a slot, one at its holder, its read.
        """
        read, before = leg.read, leg.state
        if read is None:
            return []
        commands: Commands = TRANSITIONS[before, type(event)].handler(read, leg, event, now)
        state = leg.state
        read.story.note(now, event, state, commands, f"leg {leg.number}")
        if state is QUEUED:
            self._pools[leg.device].add(read.turn_of(leg), leg)
        elif before is QUEUED and leg.slot is None:
            self._pools[leg.device].discard(read.turn_of(leg), leg)
        if leg.slot_id is not None and state in (COPYING, OVER):
            read.read_slots.setdefault(leg.source, []).append(leg.slot_id)
            leg.slot_id = leg.slot_expires_at = None
        if state is OVER:
            del read.live[leg]
            leg.read = None
            if leg.slot is not None:
                self._pools[leg.device].release(leg.slot)
                leg.slot = None
        return commands

    def _expire(self, now: float) -> Commands:
        commands: Commands = []
        is_stuck = False
        for key in self.deadlines.pop_due(now):
            read = self.live[key]
            if read.replace_at is None:
                message = "the lease of a staging slot ended before it was read"
                late = RemoteError(message, code=ErrorCode.LEASE_EXPIRED)
                commands += self._stop([read], late, now)
            else:
                is_stuck, read.replace_at = True, now + self.limits.quarantine_s
                self.deadlines.set(key, read.due_at)
        return [*commands, ReplaceDataProcess()] if is_stuck else commands


def _stopped() -> LocalError:
    return LocalError("the decode agent stops", code=ErrorCode.DRAINING)
