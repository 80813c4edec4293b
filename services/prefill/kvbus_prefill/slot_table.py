"""State machine of staging slots, and of the tiles that wait for them (sans-IO).

A ``lease`` is (offer id, epoch) for a local offer, the reader's own key for another.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any, Literal, Protocol

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.fair import FairPool, Key
from kvbus.geometry import NO_BLOCKS
from kvbus.protocol.peer import Pack, Packed
from kvbus.table.events import DeadlinePassed, EngineLost, Refuse, SendReply, Stopped, Value
from kvbus.table.table import Context as AnyContext
from kvbus.table.table import History, Table, transitions


class SlotState(StrEnum):
    WAITING = "waiting"
    """The tile waits for a slot."""

    GATHERING = "gathering"
    """The tile has a slot, and is copied there or waits for a thread."""

    PACKED = "packed"
    """The slot holds the tile; the reader reads it."""

    ABANDONED = "abandoned"
    """The request was refused, but the copy still runs: the slot is not free."""

    WIPING = "wiping"
    """Zeros are written over the slot."""

    OVER = "over"
    """The slot is free."""


WAITING, GATHERING, PACKED = SlotState.WAITING, SlotState.GATHERING, SlotState.PACKED
ABANDONED, WIPING, OVER = SlotState.ABANDONED, SlotState.WIPING, SlotState.OVER


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """Bounds of the table; ``num_slots`` is for each device."""

    num_slots: int = 16
    max_slot_lease_s: float = 30.0
    max_retired_bytes: int = 1 << 20
    wipe: bool = False


Context = AnyContext[SlotLimits]


class SlotDevice(Protocol):
    """Slots of one device by number; equal only to itself."""

    @property
    def device(self) -> str: ...

    @property
    def memory_kind(self) -> Literal["DRAM", "VRAM"]: ...

    @property
    def nixl_device(self) -> int: ...

    def address(self, slot: int) -> int: ...


class SlotWanted(Value, frozen=True):
    """Event: a reader requests a tile, whose slot only the session ``reader`` can release."""

    pack: Pack
    lease: Hashable
    reader: str
    slots: SlotDevice
    num_bytes: int
    work: Any
    reply_to: object

    @property
    def turn(self) -> Key:
        return Key(self.lease, self.pack.priority)


class SlotGranted(Value, frozen=True):
    slot: int


class GatherEnded(Value, frozen=True):
    slot_id: int
    error: KVBusError | None = None


class WipeEnded(Value, frozen=True):
    slot_id: int


class SlotReleased(Value, frozen=True):
    slot_ids: tuple[int, ...]
    reader: str


class TileCancelled(Value, frozen=True):
    lease: Hashable
    reply_to: object


class LeaseEnded(Value, frozen=True):
    """Event: a lease has ended, which invalidates its tiles."""

    lease: Hashable
    code: ErrorCode


Event = (
    SlotWanted
    | SlotGranted
    | GatherEnded
    | WipeEnded
    | SlotReleased
    | TileCancelled
    | LeaseEnded
    | EngineLost
    | Stopped
    | DeadlinePassed
)


class StartGather(Value, frozen=True):
    slot_id: int
    slot: int
    wanted: SlotWanted


class StartWipe(Value, frozen=True):
    slot_id: int
    slot: int
    slots: SlotDevice


Command = StartGather | StartWipe | SendReply | Refuse
Commands = list[Command]


@dataclass(slots=True)
class SlotEntry:
    """State of one tile; ``slot_id`` is unique for each use of a slot."""

    slot_id: int
    wanted: SlotWanted
    slot_lease_s: float
    expires_at: float
    state: SlotState = WAITING
    slot: int | None = None
    history: History = field(default_factory=History, compare=False)

    @property
    def key(self) -> int:
        return self.slot_id

    @property
    def is_over(self) -> bool:
        return self.state is OVER

    @property
    def due_at(self) -> float | None:
        return None if self.state in (ABANDONED, WIPING) else self.expires_at

    def retire(self) -> None:
        pack = replace(self.wanted.pack, table=NO_BLOCKS)
        self.wanted = replace(self.wanted, pack=pack, work=None, reply_to=None)


def start(tile: SlotEntry, event: SlotGranted, _: Context) -> Commands:
    tile.state, tile.slot = GATHERING, event.slot
    return [StartGather(tile.slot_id, event.slot, tile.wanted)]


def end_gather(tile: SlotEntry, event: GatherEnded, at: Context) -> Commands:
    request = tile.wanted
    if event.error is not None or tile.slot is None:
        error = event.error or KVBusError("the tile was gathered into no slot")
        return [Refuse(request.reply_to, error), *free(tile, event, at)]
    tile.state = PACKED
    packed = Packed(
        slot_id=tile.slot_id,
        address=request.slots.address(tile.slot),
        num_bytes=request.num_bytes,
        slot_lease_s=tile.slot_lease_s,
        memory=request.slots.memory_kind,
        device=request.slots.nixl_device,
    )
    return [SendReply(request.reply_to, packed)]


def fail(tile: SlotEntry, event: Event, _: Context) -> Commands:
    tile.state = OVER
    return [Refuse(tile.wanted.reply_to, _reason(tile, event))]


def cancel(tile: SlotEntry, event: Event, _: Context) -> Commands:
    tile.state = ABANDONED
    return [Refuse(tile.wanted.reply_to, _reason(tile, event))]


def free(tile: SlotEntry, _event: Event, at: Context) -> Commands:
    """Free or wipe the slot; later READs of it are invalid."""
    if at.limits.wipe and tile.slot is not None:
        tile.state = WIPING
        return [StartWipe(tile.slot_id, tile.slot, tile.wanted.slots)]
    tile.state = OVER
    return []


def end_wipe(tile: SlotEntry, _event: WipeEnded, _: Context) -> Commands:
    tile.state = OVER
    return []


def ignore(_tile: SlotEntry, _event: Event, _: Context) -> Commands:
    return []


def _reason(tile: SlotEntry, event: Event) -> LocalError:
    match event:
        case TileCancelled():
            return LocalError("the reader does not wait for the tile", code=ErrorCode.BUSY)
        case LeaseEnded(code=code):
            return LocalError("the lease of the offer ended", code=code)
        case EngineLost():
            return LocalError("a process of the engine ended", code=ErrorCode.ENGINE_LOST)
        case Stopped():
            return LocalError("the agent stops", code=ErrorCode.CLOSED)
    return LocalError(
        f"the tile was not gathered within its slot lease of {tile.slot_lease_s} s",
        code=ErrorCode.TIMEOUT,
        slot_lease_s=tile.slot_lease_s,
    )


ENDS = (LeaseEnded, EngineLost, Stopped)
TRANSITIONS = transitions(
    ((WAITING,), (SlotGranted,), start, (GATHERING,)),
    ((WAITING,), (*ENDS, TileCancelled, DeadlinePassed), fail, (OVER,)),
    ((GATHERING,), (GatherEnded,), end_gather, (PACKED, WIPING, OVER)),
    ((GATHERING,), (*ENDS, TileCancelled, DeadlinePassed), cancel, (ABANDONED,)),
    ((PACKED,), (*ENDS, SlotReleased, DeadlinePassed), free, (WIPING, OVER)),
    ((ABANDONED,), (GatherEnded,), free, (WIPING, OVER)),
    ((WIPING,), (WipeEnded,), end_wipe, (OVER,)),
    ((WAITING, GATHERING), (SlotReleased,), ignore, ()),
    ((ABANDONED, WIPING), (*ENDS, SlotReleased), ignore, ()),
)


class SlotTable(Table[int, SlotEntry, SlotLimits, Command]):
    transitions = TRANSITIONS

    def __init__(self, limits: SlotLimits | None = None) -> None:
        limits = limits or SlotLimits()
        super().__init__(limits, max_retired_bytes=limits.max_retired_bytes)
        self.stopped = False
        self._ids = count(1)
        self._leases: defaultdict[Hashable, dict[int, SlotEntry]] = defaultdict(dict)
        self._pools: defaultdict[SlotDevice, FairPool[int]] = defaultdict(self._new_pool)

    def _new_pool(self) -> FairPool[int]:
        """Return the pool of a device; a lease has at most half, but 2 for pipelining."""
        num_slots = self.limits.num_slots
        most = max(2, num_slots // 2)
        return FairPool(num_slots, may_have=lambda held, _free: held < most)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._pools.values()))

    @property
    def num_slots_in_use(self) -> int:
        return sum(pool.num_in_use for pool in self._pools.values())

    def _names_of(self, entry: SlotEntry) -> tuple[str, ...]:
        return (entry.wanted.pack.offer_id,)

    def _handle(self, event: Event, now: float) -> Commands:
        commands: Commands = []
        if isinstance(event, SlotWanted):
            commands = self._enqueue(event, now)
        elif not isinstance(event, DeadlinePassed):
            self.stopped |= isinstance(event, Stopped)
            commands = self._apply_all(self._hit_by(event), event, now)
        return commands + self._grant_slots(now)

    def _hit_by(self, event: Event) -> list[SlotEntry]:
        match event:
            case GatherEnded(slot_id) | WipeEnded(slot_id):
                return [self.live[slot_id]]
            case SlotReleased(slot_ids, reader):
                known = [self.live[i] for i in dict.fromkeys(slot_ids) if i in self.live]
                return [tile for tile in known if tile.wanted.reader == reader]
            case TileCancelled(lease, reply_to):
                of_lease = self._leases.get(lease, {}).values()
                return [tile for tile in of_lease if tile.wanted.reply_to is reply_to]
            case LeaseEnded(lease):
                return list(self._leases.get(lease, {}).values())
            case EngineLost(engine_id):
                return [
                    tile for tile in self.live.values() if tile.wanted.pack.engine_id == engine_id
                ]
            case _:
                return list(self.live.values())

    def _enqueue(self, wanted: SlotWanted, now: float) -> Commands:
        if self.stopped:
            return [Refuse(wanted.reply_to, LocalError("the agent stops", code=ErrorCode.CLOSED))]
        slot_lease_s = min(wanted.pack.slot_lease_s, self.limits.max_slot_lease_s)
        tile = SlotEntry(next(self._ids), wanted, slot_lease_s, expires_at=now + slot_lease_s)
        self._leases[wanted.lease][tile.slot_id] = tile
        self._pools[wanted.slots].add(wanted.turn, tile.slot_id)
        self._add(tile, wanted, now, ())
        return []

    def _grant_slots(self, now: float) -> Commands:
        commands: Commands = []
        for pool in self._pools.values():
            while (granted := pool.acquire()) is not None:
                slot_id, slot = granted
                commands += self._apply(self.live[slot_id], SlotGranted(slot), now)
        return commands

    def _retire(self, entry: SlotEntry) -> None:
        lease, pool = entry.wanted.lease, self._pools[entry.wanted.slots]
        del self._leases[lease][entry.slot_id]
        if not self._leases[lease]:
            del self._leases[lease]
        if entry.slot is None:
            pool.discard(entry.wanted.turn, entry.slot_id)
        else:
            pool.release(entry.slot)
        super()._retire(entry)
