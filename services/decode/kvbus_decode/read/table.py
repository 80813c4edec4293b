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
from kvbus.table import FairPool, Table
from kvbus_decode.read import events as ev
from kvbus_decode.read.entry import ReadEntry, ReadState
from kvbus_decode.read.leg import Leg, LegState
from kvbus_decode.read.transitions import TRANSITIONS, Commands


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Bounds of the table: packed legs of a read at a time, and slots of ours on each device."""

    legs_in_flight: int = 4
    num_slots: int = 16
    max_retired: int = 1024


class ReadTable(Table[Hashable, ReadEntry, ReadLimits, ev.Command]):
    """All reads by key; retired ones keep their story, and one of the same key goes on with it."""

    transitions = TRANSITIONS

    def __init__(self, limits: ReadLimits) -> None:
        super().__init__(limits, max_retired=limits.max_retired)
        self.stopped = False
        self._pools: defaultdict[Hashable, FairPool[Hashable, Leg]] = defaultdict(self._new_pool)
        self._read_of: dict[Leg, ReadEntry] = {}

    @property
    def num_slots_in_use(self) -> int:
        """Slots of ours that are read into or copied from."""
        return sum(pool.num_in_use for pool in self._pools.values())

    def num_reads(self, engine: Hashable) -> int:
        """Reads that can still write into the engine's blocks."""
        return sum(read.wanted.engine == engine for read in self.live.values())

    def _handle(self, event: ev.Event, now: float) -> Commands:
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
                return []
            case _:
                return self._tell(event, now)

    def _start(self, wanted: ev.ChunkWanted, now: float) -> Commands:
        if self.stopped or wanted.key in self.live:
            error = _stopped() if self.stopped else LocalError("the read is under way")
            return [ev.ChunkEnded(wanted.key, 0, "", 0.0, error)]
        before = self.retired.pop(wanted.key, None)
        read = ReadEntry.of(wanted, now, before)
        self.live[wanted.key] = read
        read.story.note(now, wanted, read.state, ())
        return self._go_on(read, now)

    def _tell(self, event: ev.LegEvent, now: float) -> Commands:
        """A leg that is over wants nothing; but a slot that is packed for it has to go back."""
        read = self._read_of.get(event.leg)
        if read is not None:
            return self._apply_leg(read, event.leg, event, now) + self._go_on(read, now)
        if isinstance(event, ev.SlotPacked):
            return [ev.ReleaseSlots(event.leg.source, (event.slot_id,))]
        return []

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
        read.state = ReadState.DRAINING
        for leg in read.waiting:
            leg.state = LegState.OVER
        read.waiting.clear()
        event = ev.LegStopped()
        return [c for leg in list(read.live) for c in self._apply_leg(read, leg, event, now)]

    def _apply_leg(self, read: ReadEntry, leg: Leg, event: object, now: float) -> Commands:
        before = leg.state
        commands: Commands = TRANSITIONS[before, type(event)].handler(read, leg, event, now)
        read.story.note(now, event, leg.state, commands, f"leg {leg.number}")
        self._account(read, leg, before)
        if read.error is not None:
            commands += self._stop_legs(read, now)
        return commands

    def _account(self, read: ReadEntry, leg: Leg, before: LegState) -> None:
        """What the leg holds: a place in the queue for a slot of ours, the slot, its read."""
        state = leg.state
        if before is LegState.WANTED:
            read.live[leg] = None
            self._read_of[leg] = read
        if state is LegState.PACKED:
            self._pools[leg.device].wait(leg.source, leg)
        elif before is LegState.PACKED and leg.slot is None:
            self._pools[leg.device].leave(leg.source, leg)
        if state is LegState.OVER:
            del read.live[leg], self._read_of[leg]
            if leg.slot is not None:
                self._pools[leg.device].release(leg.slot)
                leg.slot = None

    def _go_on(self, read: ReadEntry, now: float) -> Commands:
        """Start what may start, hand out slots of ours, and end what is over."""
        commands: Commands = []
        while leg := read.next_leg(self.limits.legs_in_flight):
            commands += self._apply_leg(read, leg, ev.LegDue(), now)
        if self._pools:
            commands += self._grant_slots(now)
        if read.read_slots:
            commands += read.release_slots()
        if read.live or read.waiting:
            self._deadlines.set(read.key, read.due_at)
        elif not read.is_over:
            commands += self._finish(read, now)
        return commands

    def _finish(self, read: ReadEntry, now: float) -> Commands:
        """No leg is left: zero what is behind the chunk, once; then it has ended."""
        if read.error is None and read.last_legs:
            read.landed_at = now
            read.waiting.extend(read.last_legs)
            read.last_legs = ()
            return self._go_on(read, now)
        read.state = ReadState.OVER
        ended = read.ended(now)
        read.story.note(now, ended, read.state, ())
        self._retire(read)
        return [ended]

    def _grant_slots(self, now: float) -> Commands:
        """Slots of ours to the legs of all reads that wait for one and may have it."""
        commands: Commands = []
        for pool in self._pools.values():
            while (granted := pool.acquire()) is not None:
                leg, slot = granted
                commands += self._apply_leg(self._read_of[leg], leg, ev.SlotGranted(slot), now)
        return commands

    def _expire(self, now: float) -> Commands:
        commands: Commands = []
        for key in self._deadlines.pop_due(now):
            read = self.live[key]
            commands += self._stop_all([read], read.lateness(now), now)
        return commands

    def _new_pool(self) -> FairPool[Hashable, Leg]:
        """A holder that stopped while it is read keeps half of the slots at most, the next such
        one half of the rest, and so on: none takes all.
        """
        return FairPool(
            self.limits.num_slots, may_have=lambda num_held, num_free: num_held < num_free
        )


def _stopped() -> LocalError:
    return LocalError("the decode agent stops", code=ErrorCode.DRAINING)
