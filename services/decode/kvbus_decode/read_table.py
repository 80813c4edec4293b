"""State machine of all reads: transfers, slots here, and the end of a read (sans-IO).

NIXL and threads cannot be cancelled. A transfer that may write into the engine's blocks is live
until the data process reports its end, or ends. Others stop immediately. Rounds (order,
read, zero, compare) follow one another, so the comparison sees the final bytes.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, Optional

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus.fair import FairPool, Key
from kvbus.table.events import DeadlinePassed, Stopped, Value
from kvbus.table.table import History, Table, transitions
from kvbus_decode.fetch.events import ReadEnded, StopReads

USABLE_SHARE = 0.99
"""Usable share of a slot's lease: if the holder's clock is faster, a late READ returns another
tile's bytes."""


class TransferState(StrEnum):
    WANTED = "wanted"
    """It waits for its turn: the number of transfers in flight is bounded."""

    PACKING = "packing"
    """The holder packs its tile."""

    ORDERING = "ordering"
    """Ranks at another agent may not have computed it yet; that agent waits for them."""

    QUEUED = "queued"
    """It waits for a slot here; a packed tile is in a slot at its holder."""

    READING = "reading"
    """A READ is planned or posted."""

    COPYING = "copying"
    """Threads copy from a slot here, mapped memory, or zeros."""

    COMPARING = "comparing"
    """Digests of both sides are compared."""

    OVER = "over"
    """No write is in flight."""


WANTED, PACKING, QUEUED = TransferState.WANTED, TransferState.PACKING, TransferState.QUEUED
ORDERING = TransferState.ORDERING
READING, COPYING = TransferState.READING, TransferState.COPYING
COMPARING, OVER = TransferState.COMPARING, TransferState.OVER


# Stages by path:
#
#     direct       wanted ────────────────────────▶ reading ─────────────▶ over
#     staged       wanted ────────────▶ queued ───▶ reading ─▶ copying ──▶ over
#     packed       wanted ─▶ packing ─▶ queued ───▶ reading ─▶ copying ──▶ over
#     mapped       wanted ───────────────────────────────────▶ copying ──▶ over
#     zeroing      wanted ───────────────────────────────────▶ copying ──▶ over
#     comparing    wanted ─▶ comparing ──────────────────────────────────▶ over
#     ordering     wanted ─▶ ordering ───────────────────────────────────▶ over
@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """Unit of work of a read, with ``slot_id`` at ``source`` and ``slot`` on ``device`` here."""

    stages: tuple[TransferState, ...]
    work: Any = None
    source: Hashable = None
    device: Hashable = None
    number: int = 0
    read: Optional["ReadEntry"] = None
    state: TransferState = WANTED
    num_begun: int = 0
    requested_at: float = 0.0
    slot_id: int | None = None
    slot_expires_at: float | None = None
    slot: int | None = None


class ChunkWanted(Value, frozen=True):
    """Event: read a chunk; ``path`` and ``nixl_agent`` are only copied to `ReadEnded`."""

    key: str
    engine: Hashable
    rounds: tuple[tuple[Transfer, ...], ...]
    path: str = ""
    priority: int = 0
    nixl_agent: str = ""


class StageEnded(Value, frozen=True):
    """Event: the stage has ended, and no write of it is in flight."""

    transfer: Transfer
    num_bytes: int = 0
    error: KVBusError | None = None
    slot_id: int | None = None
    slot_lease_s: float = 0.0


class EngineGone(Value, frozen=True):
    engine: Hashable
    error: KVBusError


class TransferDue(Value, frozen=True):
    slot: int | None = None


class TransferStopped(Value, frozen=True):
    """Internal event: the read failed or was stopped."""


Event = ChunkWanted | StageEnded | StopReads | EngineGone | Stopped | DeadlinePassed


class Begin(Value, frozen=True):
    """Command: begin a stage; a pack request releases the read slots ``done``."""

    transfer: Transfer
    stage: TransferState
    done: tuple[int, ...] = ()


class AbortTransfer(Value, frozen=True):
    """Command: begin no further part of the stage."""

    transfer: Transfer


class ReleaseSlots(Value, frozen=True):
    """Command: release slots at their holder. If that fails, their leases expire."""

    source: Any
    slot_ids: tuple[int, ...]


class ReplaceDataProcess(Value, frozen=True):
    """Command: replace the data process, as aborted stages do not end."""


Command = Begin | AbortTransfer | ReleaseSlots | ReplaceDataProcess | ReadEnded
Commands = list[Command]


@dataclass(slots=True, eq=False)
class ReadEntry:
    """State of one read; the next request to a source releases its ``read_slots``."""

    wanted: ChunkWanted
    history: History = field(default_factory=History)
    live: dict[Transfer, None] = field(default_factory=dict)
    waiting: deque[Transfer] = field(default_factory=deque)
    rounds: deque[tuple[Transfer, ...]] = field(init=False)
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
        if self.replace_at is not None:
            return self.replace_at
        times = [
            transfer.slot_expires_at
            for transfer in self.live
            if transfer.slot_expires_at is not None
        ]
        return min(times, default=None)

    def turn_of(self, transfer: Transfer) -> Key:
        return Key(transfer.source, self.wanted.priority)

    def next_transfer(self, most_queued: int) -> Transfer | None:
        while not self.waiting and not self.live and self.rounds and self.error is None:
            self.waiting.extend(self.rounds.popleft())
        if not self.waiting:
            return None
        if QUEUED in self.waiting[0].stages:
            num_queued = sum(QUEUED in transfer.stages for transfer in self.live)
            if num_queued >= most_queued:
                return None
        return self.waiting.popleft()

    def release_slots(self) -> Commands:
        waiting = {transfer.source for transfer in self.waiting}
        sources = [source for source in self.read_slots if source not in waiting]
        return [ReleaseSlots(source, tuple(self.read_slots.pop(source))) for source in sources]

    def retire(self) -> None:
        self.wanted, self.error = ChunkWanted(self.key, None, ()), None
        self.rounds.clear()


def begin(read: ReadEntry, transfer: Transfer, event: object, now: float) -> Commands:
    if isinstance(event, TransferDue):
        transfer.slot = event.slot
    transfer.state = transfer.stages[transfer.num_begun]
    transfer.num_begun += 1
    if transfer.state is QUEUED:
        return []
    if transfer.state is not PACKING:
        return [Begin(transfer, transfer.state)]
    transfer.requested_at = now
    return [Begin(transfer, PACKING, tuple(read.read_slots.pop(transfer.source, ())))]


def go_on(read: ReadEntry, transfer: Transfer, event: StageEnded, now: float) -> Commands:
    """Begin the next stage; `_expire` has failed a READ that outlived its slot's lease."""
    read.num_bytes += event.num_bytes
    read.error = read.error or event.error
    if event.slot_id is not None:
        transfer.slot_id = event.slot_id
        transfer.slot_expires_at = transfer.requested_at + USABLE_SHARE * event.slot_lease_s
    if read.error is not None or transfer.num_begun == len(transfer.stages):
        transfer.state = OVER
        return []
    return begin(read, transfer, event, now)


def stop(_read: ReadEntry, transfer: Transfer, _event: TransferStopped, _now: float) -> Commands:
    transfer.state = OVER
    return []


def abort(_read: ReadEntry, transfer: Transfer, _event: TransferStopped, _now: float) -> Commands:
    return [AbortTransfer(transfer)]


TRANSITIONS = transitions(
    ((WANTED,), (TransferDue,), begin, (ORDERING, PACKING, QUEUED, READING, COPYING, COMPARING)),
    ((PACKING,), (StageEnded,), go_on, (QUEUED, OVER)),
    ((QUEUED,), (TransferDue,), begin, (READING,)),
    ((READING,), (StageEnded,), go_on, (COPYING, OVER)),
    ((ORDERING, COPYING, COMPARING), (StageEnded,), go_on, (OVER,)),
    ((ORDERING, PACKING, QUEUED, COMPARING), (TransferStopped,), stop, (OVER,)),
    ((READING, COPYING), (TransferStopped,), abort, ()),
)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    transfers_in_flight: int = 4
    num_slots: int = 16
    quarantine_s: float = 10.0
    max_retired_bytes: int = 4 << 20


class ReadTable(Table[str, ReadEntry, ReadLimits, Command]):
    """All reads by key; a new read of a retired key continues its history."""

    def __init__(self, limits: ReadLimits) -> None:
        super().__init__(limits, max_retired_bytes=limits.max_retired_bytes)
        self.stopped = False
        # A holder that hangs while it is read keeps at most half of the slots, the next one half of
        # the rest, and so on. None can take all.
        self._pools: defaultdict[Hashable, FairPool[Transfer]] = defaultdict(
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
        transfer, slot_id = event.transfer, event.slot_id
        if (read := transfer.read) is not None:
            return self._apply_transfer(transfer, event, now) + self._go_on(read, now)
        return [] if slot_id is None else [ReleaseSlots(transfer.source, (slot_id,))]

    def _start(self, wanted: ChunkWanted, now: float) -> Commands:
        if self.stopped or wanted.key in self.live:
            error = _stopped() if self.stopped else LocalError("the read is under way")
            return [ReadEnded(wanted.key, 0, error)]
        for number, transfer in enumerate(chain.from_iterable(wanted.rounds)):
            transfer.number = number
        read = ReadEntry(wanted)
        if (before := self._remove(wanted.key)) is not None:
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
            for transfer in list(read.live):
                commands += self._apply_transfer(transfer, TransferStopped(), now)
        while (due := read.next_transfer(self.limits.transfers_in_flight)) is not None:
            due.read, read.live[due] = read, None
            commands += self._apply_transfer(due, TransferDue(), now)
        for pool in self._pools.values():
            while (granted := pool.acquire()) is not None:
                transfer, slot = granted
                commands += self._apply_transfer(transfer, TransferDue(slot), now)
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

    def _apply_transfer(self, transfer: Transfer, event: object, now: float) -> Commands:
        read, before = transfer.read, transfer.state
        if read is None:
            return []
        commands: Commands = TRANSITIONS[before, type(event)].handler(read, transfer, event, now)
        state = transfer.state
        read.history.note(now, event, state, commands, f"transfer {transfer.number}")
        if state is QUEUED:
            self._pools[transfer.device].add(read.turn_of(transfer), transfer)
        elif before is QUEUED and transfer.slot is None:
            self._pools[transfer.device].discard(read.turn_of(transfer), transfer)
        if transfer.slot_id is not None and state in (COPYING, OVER):
            read.read_slots.setdefault(transfer.source, []).append(transfer.slot_id)
            transfer.slot_id = transfer.slot_expires_at = None
        if state is OVER:
            del read.live[transfer]
            transfer.read = None
            if transfer.slot is not None:
                self._pools[transfer.device].release(transfer.slot)
                transfer.slot = None
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
