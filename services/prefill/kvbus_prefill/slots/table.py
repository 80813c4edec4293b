"""All staging slots of a prefill agent on one device: admission, turns, leases, ends (sans-IO)."""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from itertools import count

from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError
from kvbus.table import FairPool, Table
from kvbus_prefill.slots import events as ev
from kvbus_prefill.slots.entry import TRANSITIONS, Commands, SlotEntry, SlotLimits


class SlotTable(Table[int, SlotEntry, SlotLimits, ev.Command]):
    """All boxes that are not over, by slot id; ``ids`` gives those, for all tables of an agent.

    Refuses a box that is larger than a slot, and more waiting boxes than the limit.
    """

    transitions = TRANSITIONS

    def __init__(self, limits: SlotLimits | None = None, ids: Iterator[int] | None = None) -> None:
        limits = limits or SlotLimits()
        super().__init__(
            limits,
            max_retired=limits.max_retired,
            max_retired_bytes=limits.max_retired_bytes,
        )
        self.stopped = False
        self._ids = ids or count(1)
        self._num_copies = 0
        self._leases: defaultdict[Hashable, dict[int, SlotEntry]] = defaultdict(dict)
        most = limits.max_slots_of_a_lease
        self._pool: FairPool[int] = FairPool(
            limits.num_slots, may_have=lambda held, _free: held < most
        )

    @property
    def num_waiting(self) -> int:
        """Boxes without a slot."""
        return self._pool.num_waiting

    @property
    def num_slots_in_use(self) -> int:
        """Slots that are gathered into, read, or wiped, or not yet free."""
        return self._pool.num_in_use

    def _names_of(self, entry: SlotEntry) -> tuple[str, ...]:
        return (entry.asked.offer_id,)

    def _handle(self, event: ev.Event, now: float) -> Commands:
        """Slots that came free, by this event or by what was due, are given on at the end."""
        commands: Commands = []
        if isinstance(event, ev.SlotWanted):
            try:
                self._ask(event, now)
            except KVBusError as error:
                commands = [ev.Refuse(event.reply_to, error)]
        elif not isinstance(event, ev.DeadlinePassed):
            self.stopped |= isinstance(event, ev.Stopped)
            self._num_copies -= isinstance(event, ev.GatherEnded)
            commands = self._apply_all(self._hit_by(event), event, now)
        return commands + self._take_turns(now)

    def _hit_by(self, event: ev.Event) -> list[SlotEntry]:
        match event:
            case ev.GatherEnded(slot_id) | ev.WipeEnded(slot_id):
                return [self.live[slot_id]]
            case ev.GivenBack(slot_ids, reader):
                known = [self.live[i] for i in dict.fromkeys(slot_ids) if i in self.live]
                return [box for box in known if box.asked.reader == reader]
            case ev.Abandoned(lease, reply_to):
                of_lease = self._leases.get(lease, {}).values()
                return [box for box in of_lease if box.asked.reply_to is reply_to]
            case ev.LeaseEnded(lease):
                return list(self._leases.get(lease, {}).values())
            case ev.EngineLost(engine_id):
                return [box for box in self.live.values() if box.asked.engine_id == engine_id]
            case _:
                return list(self.live.values())

    def _ask(self, asked: ev.SlotWanted, now: float) -> None:
        """Have a box wait; raises `LocalError` and `GeometryError`."""
        if self.stopped:
            raise LocalError("the agent stops", code=ErrorCode.CLOSED)
        if asked.num_bytes > self.limits.slot_bytes:
            raise GeometryError(
                f"a box of {asked.num_bytes} bytes is larger than a slot of "
                f"{self.limits.slot_bytes} bytes: ask for a smaller one",
                box_bytes=asked.num_bytes,
                slot_bytes=self.limits.slot_bytes,
            )
        if self.num_waiting >= self.limits.max_waiting:
            raise LocalError(
                f"{self.num_waiting} boxes wait for a staging slot, which is the limit",
                code=ErrorCode.BUSY,
                max_packs=self.limits.max_waiting,
            )
        slot_lease_s = min(asked.slot_lease_s, self.limits.max_slot_lease_s)
        box = SlotEntry(next(self._ids), asked, slot_lease_s, expires_at=now + slot_lease_s)
        self._leases[asked.lease][box.slot_id] = box
        self._pool.wait(asked.turn, box.slot_id)
        self._add(box, asked, now, ())

    def _take_turns(self, now: float) -> Commands:
        """Slots to boxes that wait, as long as threads are free to gather into them."""
        commands: Commands = []
        while self._num_copies < self.limits.max_gathers:
            if (granted := self._pool.acquire()) is None:
                break
            slot_id, slot = granted
            self._num_copies += 1
            commands += self._apply(self.live[slot_id], ev.TurnCame(slot), now)
        return commands

    def _retire(self, entry: SlotEntry) -> None:
        lease = entry.asked.lease
        del self._leases[lease][entry.slot_id]
        if not self._leases[lease]:
            del self._leases[lease]
        if entry.slot is None:
            self._pool.leave(entry.asked.turn, entry.slot_id)
        else:
            self._pool.release(entry.slot)
        super()._retire(entry)
