"""All reads of one decode agent: turns, slots of ours, deadlines, and how a read ends (sans-IO).

    ChunkWanted ─▶ legs ─▶ at most so many packed ones at a time ─▶ ... ─▶ last legs ─▶ ChunkEnded
                              │ ▲
                              ▼ │ slots of ours, holder by holder in fair turn

A read ends when none of its legs can write any more, and at no other time. So `ChunkEnded` is the
one place where blocks become free, whatever was aborted, lost or late before.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.table import FairPool, Story, Table
from kvbus_decode.read import events as ev
from kvbus_decode.read.entry import DelegatedKey, ReadEntry, ReadState
from kvbus_decode.read.leg import Leg, LegState
from kvbus_decode.read.transitions import TRANSITIONS, Commands


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Bounds of the table: packed legs of a read at a time, and slots of ours on each device.

    READs that drain for ``quarantine_s`` are ended from outside.
    """

    legs_in_flight: int = 4
    num_slots: int = 16
    quarantine_s: float = 60.0
    max_retired: int = 1024
    max_retired_bytes: int = 32 << 20


class ReadTable(Table[Hashable, ReadEntry, ReadLimits, ev.Command]):
    """All reads by key; retired ones keep their story, and one of the same key goes on with it."""

    transitions = TRANSITIONS

    def __init__(self, limits: ReadLimits) -> None:
        super().__init__(
            limits,
            max_retired=limits.max_retired,
            max_retired_bytes=limits.max_retired_bytes,
        )
        self.stopped = False
        self._pools: defaultdict[Hashable, FairPool[Hashable, Leg]] = defaultdict(self._new_pool)
        self._read_of: dict[Leg, ReadEntry] = {}

    @property
    def num_slots_in_use(self) -> int:
        """Slots of ours that are read into or copied from."""
        return sum(pool.num_in_use for pool in self._pools.values())

    def _names_of(self, entry: ReadEntry) -> tuple[str, ...]:
        return (entry.key.fetch_id,) if isinstance(entry.key, DelegatedKey) else ()

    def num_reads(self, engine: Hashable) -> int:
        """Reads that can still write into the engine's blocks."""
        return sum(read.wanted.engine == engine for read in self.live.values())

    def _handle(self, event: ev.Event, now: float) -> Commands:
        """A leg that is over wants nothing; but a slot that is packed for it has to go back."""
        commands: Commands = []
        match event:
            case ev.ChunkWanted():
                return self._start(event, now)
            case ev.ReadStopped(key, error):
                return self._stop_all([self.live[key]] if key in self.live else [], error, now)
            case ev.EngineGone(engine, error):
                return self._lose_engine(engine, error, now)
            case ev.Stopped():
                self.stopped = True
                return self._stop_all(self.live.values(), _stopped(), now)
            case ev.DeadlinePassed():
                pass
            case _ if read := self._read_of.get(event.leg):
                commands = self._apply_leg(read, event.leg, event, now) + self._go_on(read, now)
            case ev.SlotPacked(leg=leg, slot_id=slot_id):
                commands = [ev.ReleaseSlots(leg.source, (slot_id,))]
        return commands

    def _start(self, wanted: ev.ChunkWanted, now: float) -> Commands:
        if self.stopped or wanted.key in self.live:
            error = _stopped() if self.stopped else LocalError("the read is under way")
            return [ev.ChunkEnded(wanted.key, 0, "", 0.0, error)]
        for number, leg in enumerate(wanted.legs + wanted.last_legs):
            leg.number = number
        before = self._forget(wanted.key)
        read = ReadEntry(wanted, now, Story() if before is None else before.story)
        self._add(read, wanted, now, ())
        return self._go_on(read, now)

    def _lose_engine(self, engine: Hashable, error: KVBusError, now: float) -> Commands:
        """What it has at other agents is not waited for any longer."""
        lost = [read for read in self.live.values() if read.wanted.engine == engine]
        commands = self._stop_all(lost, error, now, settle=False)
        event = ev.EngineGone(engine, error)
        for read in lost:
            for leg in [leg for leg in read.live if leg.state is LegState.DELEGATED]:
                commands += self._apply_leg(read, leg, event, now)
            commands += self._go_on(read, now)
        return commands

    def _stop_all(
        self, reads: Iterable[ReadEntry], error: KVBusError, now: float, *, settle: bool = True
    ) -> Commands:
        commands: Commands = []
        for read in list(reads):
            read.error = read.error or error
            commands += self._stop_legs(read, now)
            if settle:
                commands += self._go_on(read, now)
        return commands

    def _stop_legs(self, read: ReadEntry, now: float) -> Commands:
        """The read has failed: nothing new of it starts, what is in flight drains."""
        if read.state is not ReadState.READING:
            return []
        read.state, read.recycle_at = ReadState.DRAINING, now + self.limits.quarantine_s
        for leg in read.waiting:
            leg.state = LegState.OVER
        read.waiting.clear()
        event = ev.LegStopped()
        return [c for leg in list(read.live) for c in self._apply_leg(read, leg, event, now)]

    def _apply_leg(self, read: ReadEntry, leg: Leg, event: object, now: float) -> Commands:
        """Apply ``event``, and account what the leg holds.

        That is a place in the queue for a slot of ours, such a slot, one at its holder, its read.
        """
        before = leg.state
        commands: Commands = TRANSITIONS[before, type(event)].handler(read, leg, event, now)
        state = leg.state
        read.story.note(now, event, state, commands, f"leg {leg.number}")
        if before is LegState.WANTED:
            read.live[leg] = None
            self._read_of[leg] = read
        if state is LegState.PACKED:
            self._pools[leg.device].wait(leg.source, leg, read.wanted.priority)
        elif before is LegState.PACKED and leg.slot is None:
            self._pools[leg.device].leave(leg.source, leg)
        if leg.slot_id is not None and state in (LegState.COPYING, LegState.OVER):
            read.read_slots.setdefault(leg.source, []).append(leg.slot_id)
            leg.slot_id = leg.slot_expires_at = None
        if state is LegState.OVER:
            del read.live[leg], self._read_of[leg]
            if leg.slot is not None:
                self._pools[leg.device].release(leg.slot)
                leg.slot = None
        if read.error is not None:
            commands += self._stop_legs(read, now)
        return commands

    def _go_on(self, read: ReadEntry, now: float) -> Commands:
        """Start what may start, hand out slots of ours, and end what is over."""
        commands: Commands = []
        while leg := read.next_leg(self.limits.legs_in_flight):
            commands += self._apply_leg(read, leg, ev.LegDue(), now)
        for pool in self._pools.values():
            while (granted := pool.acquire()) is not None:
                leg, slot = granted
                commands += self._apply_leg(self._read_of[leg], leg, ev.SlotGranted(slot), now)
        if read.read_slots:
            commands += read.release_slots()
        if read.has_landed and not read.is_over:
            commands += self._finish(read, now)
        self._deadlines.set(read.key, read.due_at)
        return commands

    def _finish(self, read: ReadEntry, now: float) -> Commands:
        """No leg moves bytes: zero what is behind the chunk, once; compare; then it has ended."""
        read.landed_at = now if read.landed_at is None else read.landed_at
        if read.error is None and read.last_legs:
            read.waiting.extend(read.last_legs)
            read.last_legs = ()
            return self._go_on(read, now)
        if read.live:
            known = [leg for leg in read.live if leg.state is LegState.KNOWN]
            return [c for leg in known for c in self._apply_leg(read, leg, ev.OthersOver(), now)]
        read.state = ReadState.OVER
        seconds = read.landed_at - read.started_at
        path = read.path if read.num_bytes else ""
        ended = ev.ChunkEnded(read.key, read.num_bytes, path, seconds, read.error)
        read.story.note(now, ended, read.state, ())
        self._retire(read)
        return [ended]

    def _expire(self, now: float) -> Commands:
        commands: Commands = []
        recycles = False
        for key in self._deadlines.pop_due(now):
            read = self.live[key]
            if read.state is ReadState.READING:
                commands += self._stop_all([read], read.lateness(now), now)
                continue
            recycles, read.recycle_at = True, now + self.limits.quarantine_s
            self._deadlines.set(key, read.due_at)
        return [*commands, ev.RecycleTransport()] if recycles else commands

    def _new_pool(self) -> FairPool[Hashable, Leg]:
        """A holder that stopped while it is read keeps half of the slots at most, the next such
        one half of the rest, and so on: none takes all.
        """
        return FairPool(
            self.limits.num_slots, may_have=lambda num_held, num_free: num_held < num_free
        )


def _stopped() -> LocalError:
    return LocalError("the decode agent stops", code=ErrorCode.DRAINING)
