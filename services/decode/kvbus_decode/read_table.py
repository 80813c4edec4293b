"""State machine of all reads of a decode agent: legs, slots here, and the end of a read (sans-IO).

    ChunkWanted ─▶ legs ─▶ up to `legs_in_flight` with slots ─▶ ... ─▶ next round ─▶ ReadEnded
                              │ ▲
                              ▼ │ slots here, fairly between holders

The stages of a leg depend on the path:

    direct       wanted ────────────────────────▶ reading ─────────────▶ over
    staged       wanted ────────────▶ queued ───▶ reading ─▶ copying ──▶ over
    packed       wanted ─▶ packing ─▶ queued ───▶ reading ─▶ copying ──▶ over
    mapped       wanted ───────────────────────────────────▶ copying ──▶ over
    zeroing      wanted ───────────────────────────────────▶ copying ──▶ over
    comparing    wanted ─▶ comparing ──────────────────────────────────▶ over

NIXL and threads cannot be cancelled. A leg that may write into the engine's blocks is reading
without a slot, or copying. It stays live until the data process reports its end, or ends itself.
All other legs stop immediately. Only `ReadEnded` frees blocks, even after an abort or a loss.

Rounds run one after the other: read, zero, compare. The comparison thus sees the final bytes.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, Optional

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus.table import FairPool, History, Key, Table, transitions
from kvbus.table.events import DeadlinePassed, Stopped, Value
from kvbus_decode.fetch.events import ReadEnded, StopReads

USABLE_SHARE = 0.99
"""Usable share of a slot's lease: the holder's clock may be faster, and a late READ would return
another box's bytes unnoticed. Leases of offers need no margin, since their agent confirms them.
"""


class LegState(StrEnum):
    WANTED = "wanted"
    """It waits for its turn: the number of legs in flight is bounded."""

    PACKING = "packing"
    """The holder packs its box."""

    QUEUED = "queued"
    """It waits for a slot here; a packed box is in a slot at its holder."""

    READING = "reading"
    """A READ is planned or posted."""

    COPYING = "copying"
    """Threads copy from a slot here, mapped memory, or zeros."""

    COMPARING = "comparing"
    """Digests of both sides are compared."""

    OVER = "over"
    """No write is in flight."""


WANTED, PACKING, QUEUED = LegState.WANTED, LegState.PACKING, LegState.QUEUED
READING, COPYING = LegState.READING, LegState.COPYING
COMPARING, OVER = LegState.COMPARING, LegState.OVER


@dataclass(slots=True, eq=False, kw_only=True)
class Leg:
    """Unit of work of a read; ``work`` is opaque here.

    ``slot_id`` names its slot at ``source``, ``slot`` is the number of its slot on ``device`` here.
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
    """Event: read a chunk into the blocks of ``engine``. Legs of higher ``priority`` get slots
    first.

    ``path`` and ``nixl_agent`` are only copied to `ReadEnded`.
    """

    key: str
    engine: Hashable
    rounds: tuple[tuple[Leg, ...], ...]
    path: str = ""
    priority: int = 0
    nixl_agent: str = ""


class StageEnded(Value, frozen=True):
    """Event: the current stage of a leg has ended, and no write of it is in flight.

    The lease of a packed slot starts at the request.
    """

    leg: Leg
    num_bytes: int = 0
    error: KVBusError | None = None
    slot_id: int | None = None
    slot_lease_s: float = 0.0


class EngineGone(Value, frozen=True):
    engine: Hashable
    error: KVBusError


class LegDue(Value, frozen=True):
    """Internal event: the leg may start, or has a slot here."""

    slot: int | None = None


class LegStopped(Value, frozen=True):
    """Internal event: the read failed or was stopped."""


Event = ChunkWanted | StageEnded | StopReads | EngineGone | Stopped | DeadlinePassed


class Begin(Value, frozen=True):
    """Command: begin ``stage`` of the leg. The agent dispatches one `StageEnded` in return.

    ``done`` are slots at the holder that have been read. A pack request releases them.
    """

    leg: Leg
    stage: LegState
    done: tuple[int, ...] = ()


class Abort(Value, frozen=True):
    """Command: begin no further part of the stage. `StageEnded` follows when nothing runs."""

    leg: Leg


class ReleaseSlots(Value, frozen=True):
    """Command: release slots at their holder. If that fails, their leases expire."""

    source: Any
    slot_ids: tuple[int, ...]


class ReplaceDataProcess(Value, frozen=True):
    """Command: replace the data process, as aborted stages do not end. `StageEnded` follows for
    each.
    """


Command = Begin | Abort | ReleaseSlots | ReplaceDataProcess | ReadEnded
Commands = list[Command]


@dataclass(slots=True, eq=False)
class ReadEntry:
    """State of one read. ``live`` are its legs that have started and are not over.

    The next request to a source releases its ``read_slots``.
    """

    wanted: ChunkWanted
    history: History = field(default_factory=History)
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
        """Return the first end of the lease of an unread slot or, while draining, `replace_at`."""
        if self.replace_at is not None:
            return self.replace_at
        times = [leg.slot_expires_at for leg in self.live if leg.slot_expires_at is not None]
        return min(times, default=None)

    def turn_of(self, leg: Leg) -> Key:
        return Key(leg.source, self.wanted.priority)

    def next_leg(self, most_queued: int) -> Leg | None:
        """Remove and return the leg that may start now, if any."""
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
        asked = {leg.source for leg in self.waiting}
        sources = [source for source in self.read_slots if source not in asked]
        return [ReleaseSlots(source, tuple(self.read_slots.pop(source))) for source in sources]

    def retire(self) -> None:
        self.wanted, self.error = ChunkWanted(self.key, None, ()), None
        self.rounds.clear()


def begin(read: ReadEntry, leg: Leg, event: object, now: float) -> Commands:
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
    """Begin the next stage, or end the leg.

    `_expire` has failed the read by now if the READ outlived its slot's lease.
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
    leg.state = OVER
    return []


def abort(_read: ReadEntry, leg: Leg, _event: LegStopped, _now: float) -> Commands:
    """NIXL cannot cancel a posted READ, and a thread finishes its part."""
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
    """Bounds. A read that drains for ``quarantine_s`` causes the data process to be replaced."""

    legs_in_flight: int = 4
    num_slots: int = 16
    quarantine_s: float = 10.0
    max_retired_bytes: int = 4 << 20


class ReadTable(Table[str, ReadEntry, ReadLimits, Command]):
    """Table of all reads by key. A new read of a retired key continues its history."""

    def __init__(self, limits: ReadLimits) -> None:
        super().__init__(limits, max_retired_bytes=limits.max_retired_bytes)
        self.stopped = False
        # A holder that hangs while it is read keeps at most half of the slots, the next one half of
        # the rest, and so on. None can take all.
        self._pools: defaultdict[Hashable, FairPool[Leg]] = defaultdict(
            lambda: FairPool(limits.num_slots, may_have=lambda held, free: held < free)
        )

    @property
    def num_slots_in_use(self) -> int:
        return sum(pool.num_in_use for pool in self._pools.values())

    def num_reads(self, engine: Hashable) -> int:
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
            read.history = before.history
        self._add(read, wanted, now, ())
        return self._go_on(read, now)

    def _stop(self, reads: Iterable[ReadEntry], error: KVBusError, now: float) -> Commands:
        commands: Commands = []
        for read in reads:
            read.error = read.error or error
            commands += self._go_on(read, now)
        return commands

    def _go_on(self, read: ReadEntry, now: float) -> Commands:
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
            read.history.note(now, ended, read.state, ())
            self._retire(read)
            commands.append(ended)
        self.deadlines.set(read.key, None if read.is_over else read.due_at)
        return commands

    def _apply_leg(self, leg: Leg, event: object, now: float) -> Commands:
        read, before = leg.read, leg.state
        if read is None:
            return []
        commands: Commands = TRANSITIONS[before, type(event)].handler(read, leg, event, now)
        state = leg.state
        read.history.note(now, event, state, commands, f"leg {leg.number}")
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
