"""All staging slots of a prefill agent in one place: admission, turns, leases, ends (sans-IO).

Refuses clocks, sockets, tensors, logs and random numbers: events and times come in, commands come
out. Refuses a box that is larger than a slot, and more waiting boxes than the limit.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError
from kvbus.table.deadlines import Deadlines
from kvbus_prefill.slots import events as ev
from kvbus_prefill.slots.entry import TRANSITIONS, Commands, SlotEntry, SlotState
from kvbus_prefill.slots.turns import Turns


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """Bounds of the table; ``max_gathers`` run at once, ``max_waiting`` wait over all leases."""

    num_slots: int = 16
    slot_bytes: int = 8 << 20
    max_gathers: int = 1
    max_waiting: int = 1024
    max_slot_lease_s: float = 30.0

    @property
    def max_slots_of_a_lease(self) -> int:
        """Half of them, so that a reader that stopped leaves some; but 2, as packing pipelines."""
        return min(self.num_slots, max(2, self.num_slots // 2))


@dataclass(slots=True)
class SlotTable:
    """All slots of one place, and who waits for one; `handle` is the only way to change anything.

    ``packs`` holds every box that is not over, by slot id; ``ids`` gives those, for all tables of
    an agent.
    """

    limits: SlotLimits = field(default_factory=SlotLimits)
    ids: Iterator[int] = field(default_factory=lambda: count(1))
    packs: dict[int, SlotEntry] = field(default_factory=dict)
    stopped: bool = False
    _free: list[int] = field(init=False)
    _num_gathers: int = 0
    _turns: Turns = field(default_factory=Turns)
    _leases: defaultdict[Hashable, dict[int, SlotEntry]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _num_held: defaultdict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    _deadlines: Deadlines[int] = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        self._free = list(reversed(range(self.limits.num_slots)))

    @property
    def num_waiting(self) -> int:
        """Boxes without a slot."""
        return len(self._turns)

    @property
    def num_slots_in_use(self) -> int:
        """Slots that are gathered into, or read, or neither yet free."""
        return self.limits.num_slots - len(self._free)

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        """Apply ``event`` at time ``now`` and return what the agent has to do, in order.

        Whatever is due by ``now`` expires first.
        """
        commands = self._expire(now)
        match event:
            case ev.SlotWanted():
                commands += self._ask(event, now)
            case ev.GatherEnded(slot_id):
                commands += self._apply(self.packs[slot_id], event)
            case ev.GivenBack(slot_ids, reader):
                known = [self.packs[i] for i in dict.fromkeys(slot_ids) if i in self.packs]
                commands += self._apply_all([p for p in known if p.asked.reader == reader], event)
            case ev.LeaseEnded(lease):
                commands += self._apply_all(self._leases.get(lease, {}).values(), event)
            case ev.EngineLost(engine_id):
                mine = [p for p in self.packs.values() if p.asked.engine_id == engine_id]
                commands += self._apply_all(mine, event)
            case ev.Stopped():
                self.stopped = True
                commands += self._apply_all(self.packs.values(), event)
        return commands + self._take_turns()

    def next_deadline(self) -> float | None:
        """When to send `DeadlinePassed` at the latest, or None while nothing can expire."""
        return self._deadlines.next()

    def _ask(self, asked: ev.SlotWanted, now: float) -> Commands:
        try:
            self._check_admission(asked)
        except KVBusError as error:
            return [ev.Refuse(asked.reply_to, error)]
        slot_id = next(self.ids)
        slot_lease_s = min(asked.slot_lease_s, self.limits.max_slot_lease_s)
        pack = SlotEntry(slot_id, asked, slot_lease_s, expires_at=now + slot_lease_s)
        self.packs[pack.slot_id] = self._leases[asked.lease][pack.slot_id] = pack
        self._turns.join(asked.lease, pack.slot_id)
        self._deadlines.set(pack.slot_id, pack.expires_at)
        return []

    def _check_admission(self, asked: ev.SlotWanted) -> None:
        if self.stopped:
            raise LocalError("the agent stops", code=ErrorCode.CLOSED)
        if asked.num_bytes > self.limits.slot_bytes:
            raise GeometryError(
                f"a box of {asked.num_bytes} bytes is larger than a slot of "
                f"{self.limits.slot_bytes} bytes: ask for a smaller one",
                box_bytes=asked.num_bytes,
                slot_bytes=self.limits.slot_bytes,
            )
        if len(self._turns) >= self.limits.max_waiting:
            raise LocalError(
                f"{len(self._turns)} boxes wait for a staging slot, which is the limit",
                code=ErrorCode.BUSY,
                max_packs=self.limits.max_waiting,
            )

    def _take_turns(self) -> Commands:
        commands: Commands = []
        while self._free and self._num_gathers < self.limits.max_gathers:
            slot_id = self._turns.take(self._may_have_slot)
            if slot_id is None:
                break
            pack, slot = self.packs[slot_id], self._free.pop()
            self._num_held[pack.asked.lease] += 1
            commands += self._apply(pack, ev.TurnCame(slot))
        return commands

    def _may_have_slot(self, lease: Hashable) -> bool:
        return self._num_held.get(lease, 0) < self.limits.max_slots_of_a_lease

    def _apply(self, pack: SlotEntry, event: ev.Event) -> Commands:
        before = pack.state
        commands = TRANSITIONS[before, type(event)].handler(pack, event)
        running = (SlotState.GATHERING, SlotState.ABANDONED)
        self._num_gathers += (pack.state in running) - (before in running)
        if pack.state is SlotState.ABANDONED:
            self._deadlines.discard(pack.slot_id)
        elif pack.state is SlotState.OVER:
            if before is SlotState.WAITING:
                self._turns.leave(pack.asked.lease, pack.slot_id)
            self._forget(pack)
        return commands

    def _apply_all(self, packs: Iterable[SlotEntry], event: ev.Event) -> Commands:
        return [command for pack in list(packs) for command in self._apply(pack, event)]

    def _forget(self, pack: SlotEntry) -> None:
        lease = pack.asked.lease
        self._deadlines.discard(pack.slot_id)
        del self.packs[pack.slot_id], self._leases[lease][pack.slot_id]
        if pack.slot is not None:
            self._free.append(pack.slot)
            self._num_held[lease] -= 1
        if not self._leases[lease]:
            del self._leases[lease]
            self._num_held.pop(lease, None)

    def _expire(self, now: float) -> Commands:
        due = [self.packs[slot_id] for slot_id in self._deadlines.pop_due(now)]
        return self._apply_all(due, ev.DeadlinePassed())
