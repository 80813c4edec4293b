"""The staging slots of a prefill agent, and the boxes that readers want there (pure).

A ``lease`` is any key: (offer id, epoch) of an offer here, the reader's own key for one elsewhere.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any, Literal, Protocol

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.geometry import BlockTable
from kvbus.protocol.peer import Pack, Packed
from kvbus.table import Context as AnyContext
from kvbus.table import FairPool, Key, Story, Table, transitions
from kvbus.table.events import DeadlinePassed, EngineLost, Refuse, SendReply, Stopped, Value


class SlotState(StrEnum):
    """Where a box is; it has a slot from gathering on, until it is over."""

    WAITING = "waiting"
    """It is another lease's turn, or no slot is free."""

    GATHERING = "gathering"
    """The box is copied into its slot, or waits for a thread."""

    PACKED = "packed"
    """The reader was told, and may read the slot."""

    ABANDONED = "abandoned"
    """Refused and not wanted any more, but the copy still runs: its slot is not free."""

    WIPING = "wiping"
    """No reader reads the slot any more; where slots are wiped, zeros are written over it."""

    OVER = "over"
    """The slot, if it had one, is free."""


WAITING, GATHERING, PACKED = SlotState.WAITING, SlotState.GATHERING, SlotState.PACKED
ABANDONED, WIPING, OVER = SlotState.ABANDONED, SlotState.WIPING, SlotState.OVER


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """Bounds of the table; each device has ``num_slots``.

    ``wipe`` says that a slot is zeroed before it is free. How many boxes wait is bounded by the
    requests for them.
    """

    num_slots: int = 16
    max_slot_lease_s: float = 30.0
    max_retired_bytes: int = 1 << 20
    wipe: bool = False


Context = AnyContext[SlotLimits]


class DeviceSlots(Protocol):
    """The slots of one device, by their numbers; equal only to itself."""

    @property
    def device(self) -> str: ...

    @property
    def memory_kind(self) -> Literal["DRAM", "VRAM"]: ...

    @property
    def nixl_device(self) -> int: ...

    def address(self, slot: int) -> int: ...


class SlotWanted(Value, frozen=True):
    """A reader wants a box of ``num_bytes`` gathered into one of ``slots``.

    ``work`` tells the agent how. ``reader`` is the name of the session that asked: only it can give
    the slot back.
    """

    pack: Pack
    lease: Hashable
    reader: str
    slots: DeviceSlots
    num_bytes: int
    work: Any
    reply_to: object

    @property
    def turn(self) -> Key:
        """What it waits under, for a slot and then for a thread."""
        return Key(self.lease, self.pack.priority)


class SlotGranted(Value, frozen=True):
    """A slot of its device is free, and no other lease comes first."""

    slot: int


class GatherEnded(Value, frozen=True):
    """The copy into a slot ended, with ``error`` if it failed."""

    slot_id: int
    error: KVBusError | None = None


class WipeEnded(Value, frozen=True):
    """Zeros are written over what was gathered."""

    slot_id: int


class GivenBack(Value, frozen=True):
    """A reader has read slots, or does not want them any more; ids that it has not do nothing."""

    slot_ids: tuple[int, ...]
    reader: str


class BoxAbandoned(Value, frozen=True):
    """A reader that waits for its box has been told to ask again, or is not there any more."""

    lease: Hashable
    reply_to: object


class LeaseEnded(Value, frozen=True):
    """The lease of an offer is over, as ``code`` says: what was gathered under it is not valid."""

    lease: Hashable
    code: ErrorCode


Event = (
    SlotWanted
    | SlotGranted
    | GatherEnded
    | WipeEnded
    | GivenBack
    | BoxAbandoned
    | LeaseEnded
    | EngineLost
    | Stopped
    | DeadlinePassed
)


class StartGather(Value, frozen=True):
    """Copy the box of ``asked`` into slot number ``slot``, and tell when that has ended."""

    slot_id: int
    slot: int
    asked: SlotWanted


class StartWipe(Value, frozen=True):
    """Write zeros over slot number ``slot``, and tell when that has ended."""

    slot_id: int
    slot: int
    slots: DeviceSlots


Command = StartGather | StartWipe | SendReply | Refuse
Commands = list[Command]


@dataclass(slots=True)
class SlotEntry:
    """One box; ``slot_id`` names this use of a slot and no other."""

    slot_id: int
    asked: SlotWanted
    slot_lease_s: float
    expires_at: float
    state: SlotState = WAITING
    slot: int | None = None
    story: Story = field(default_factory=Story, compare=False)

    @property
    def key(self) -> int:
        return self.slot_id

    @property
    def is_over(self) -> bool:
        return self.state is OVER

    @property
    def due_at(self) -> float | None:
        """When its lease ends; None while only a copy or a wipe counts."""
        return None if self.state in (ABANDONED, WIPING) else self.expires_at

    def retire(self) -> None:
        """Keep neither the memory that it was copied from, nor the call, nor the block table."""
        pack = replace(self.asked.pack, table=BlockTable(b""))
        self.asked = replace(self.asked, pack=pack, work=None, reply_to=None)


def start(box: SlotEntry, event: SlotGranted, _: Context) -> Commands:
    """The slot is this box's from now on."""
    box.state, box.slot = GATHERING, event.slot
    return [StartGather(box.slot_id, event.slot, box.asked)]


def end_gather(box: SlotEntry, event: GatherEnded, at: Context) -> Commands:
    """The reader may read, or learns why not."""
    asked = box.asked
    if event.error is not None or box.slot is None:
        error = event.error or KVBusError("the box was gathered into no slot")
        return [Refuse(asked.reply_to, error), *free(box, event, at)]
    box.state = PACKED
    packed = Packed(
        slot_id=box.slot_id,
        address=asked.slots.address(box.slot),
        num_bytes=asked.num_bytes,
        slot_lease_s=box.slot_lease_s,
        memory=asked.slots.memory_kind,
        device=asked.slots.nixl_device,
    )
    return [SendReply(asked.reply_to, packed)]


def give_up(box: SlotEntry, event: Event, _: Context) -> Commands:
    """It was not gathered yet."""
    box.state = OVER
    return [Refuse(box.asked.reply_to, _reason(box, event))]


def abandon(box: SlotEntry, event: Event, _: Context) -> Commands:
    """The reader need not wait for the copy; the slot has to."""
    box.state = ABANDONED
    return [Refuse(box.asked.reply_to, _reason(box, event))]


def free(box: SlotEntry, _event: Event, at: Context) -> Commands:
    """The slot is not written into, and nothing that is read from it now is valid."""
    if at.limits.wipe and box.slot is not None:
        box.state = WIPING
        return [StartWipe(box.slot_id, box.slot, box.asked.slots)]
    box.state = OVER
    return []


def end_wipe(box: SlotEntry, _event: WipeEnded, _: Context) -> Commands:
    box.state = OVER
    return []


def ignore(_box: SlotEntry, _event: Event, _: Context) -> Commands:
    """It was said before, or by a reader that cannot know."""
    return []


def _reason(box: SlotEntry, event: Event) -> LocalError:
    match event:
        case BoxAbandoned():
            return LocalError("the reader does not wait for the box", code=ErrorCode.BUSY)
        case LeaseEnded(code=code):
            return LocalError("the lease of the offer ended", code=code)
        case EngineLost():
            return LocalError("a process of the engine ended", code=ErrorCode.ENGINE_LOST)
        case Stopped():
            return LocalError("the agent stops", code=ErrorCode.CLOSED)
    return LocalError(
        f"the box was not gathered within its slot lease of {box.slot_lease_s} s",
        code=ErrorCode.TIMEOUT,
        slot_lease_s=box.slot_lease_s,
    )


ENDS = (LeaseEnded, EngineLost, Stopped)
TRANSITIONS = transitions(
    ((WAITING,), (SlotGranted,), start, (GATHERING,)),
    ((WAITING,), (*ENDS, BoxAbandoned, DeadlinePassed), give_up, (OVER,)),
    ((GATHERING,), (GatherEnded,), end_gather, (PACKED, WIPING, OVER)),
    ((GATHERING,), (*ENDS, BoxAbandoned, DeadlinePassed), abandon, (ABANDONED,)),
    ((PACKED,), (*ENDS, GivenBack, DeadlinePassed), free, (WIPING, OVER)),
    ((ABANDONED,), (GatherEnded,), free, (WIPING, OVER)),
    ((WIPING,), (WipeEnded,), end_wipe, (OVER,)),
    ((WAITING, GATHERING), (GivenBack,), ignore, ()),
    ((ABANDONED, WIPING), (*ENDS, GivenBack), ignore, ()),
)


class SlotTable(Table[int, SlotEntry, SlotLimits, Command]):
    """All boxes that are not over, by slot id."""

    transitions = TRANSITIONS

    def __init__(self, limits: SlotLimits | None = None) -> None:
        limits = limits or SlotLimits()
        super().__init__(limits, max_retired_bytes=limits.max_retired_bytes)
        self.stopped = False
        self._ids = count(1)
        self._leases: defaultdict[Hashable, dict[int, SlotEntry]] = defaultdict(dict)
        self._pools: defaultdict[DeviceSlots, FairPool[int]] = defaultdict(self._new_pool)

    def _new_pool(self) -> FairPool[int]:
        """Of a device. A lease has half of it, so that a reader that stopped leaves some.

        But it has 2, as packing pipelines.
        """
        num_slots = self.limits.num_slots
        most = max(2, num_slots // 2)
        return FairPool(num_slots, may_have=lambda held, _free: held < most)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._pools.values()))

    @property
    def num_slots_in_use(self) -> int:
        """Slots that are gathered into, read, or wiped, or not yet free."""
        return sum(pool.num_in_use for pool in self._pools.values())

    def _names_of(self, entry: SlotEntry) -> tuple[str, ...]:
        return (entry.asked.pack.offer_id,)

    def _handle(self, event: Event, now: float) -> Commands:
        """Slots that came free, by this event or by what was due, are given on at the end."""
        commands: Commands = []
        if isinstance(event, SlotWanted):
            commands = self._ask(event, now)
        elif not isinstance(event, DeadlinePassed):
            self.stopped |= isinstance(event, Stopped)
            commands = self._apply_all(self._hit_by(event), event, now)
        return commands + self._take_turns(now)

    def _hit_by(self, event: Event) -> list[SlotEntry]:
        match event:
            case GatherEnded(slot_id) | WipeEnded(slot_id):
                return [self.live[slot_id]]
            case GivenBack(slot_ids, reader):
                known = [self.live[i] for i in dict.fromkeys(slot_ids) if i in self.live]
                return [box for box in known if box.asked.reader == reader]
            case BoxAbandoned(lease, reply_to):
                of_lease = self._leases.get(lease, {}).values()
                return [box for box in of_lease if box.asked.reply_to is reply_to]
            case LeaseEnded(lease):
                return list(self._leases.get(lease, {}).values())
            case EngineLost(engine_id):
                return [box for box in self.live.values() if box.asked.pack.engine_id == engine_id]
            case _:
                return list(self.live.values())

    def _ask(self, asked: SlotWanted, now: float) -> Commands:
        if self.stopped:
            return [Refuse(asked.reply_to, LocalError("the agent stops", code=ErrorCode.CLOSED))]
        slot_lease_s = min(asked.pack.slot_lease_s, self.limits.max_slot_lease_s)
        box = SlotEntry(next(self._ids), asked, slot_lease_s, expires_at=now + slot_lease_s)
        self._leases[asked.lease][box.slot_id] = box
        self._pools[asked.slots].add(asked.turn, box.slot_id)
        self._add(box, asked, now, ())
        return []

    def _take_turns(self, now: float) -> Commands:
        """Slots to boxes that wait; threads are given to them in the same turns (`Copiers`)."""
        commands: Commands = []
        for pool in self._pools.values():
            while (granted := pool.acquire()) is not None:
                slot_id, slot = granted
                commands += self._apply(self.live[slot_id], SlotGranted(slot), now)
        return commands

    def _retire(self, entry: SlotEntry) -> None:
        lease, pool = entry.asked.lease, self._pools[entry.asked.slots]
        del self._leases[lease][entry.slot_id]
        if not self._leases[lease]:
            del self._leases[lease]
        if entry.slot is None:
            pool.discard(entry.asked.turn, entry.slot_id)
        else:
            pool.release(entry.slot)
        super()._retire(entry)
