"""One box that a reader wants in a staging slot: where it is, and which event does what to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.table import Context as AnyContext
from kvbus.table import Story, Transition
from kvbus_prefill.slots import events as ev


class SlotState(StrEnum):
    """Where a box is; it has a slot from gathering on, until it is over."""

    WAITING = "waiting"
    """It is another lease's turn, or no slot or no thread is free."""

    GATHERING = "gathering"
    """The box is copied into its slot."""

    PACKED = "packed"
    """The reader was told, and may read the slot."""

    ABANDONED = "abandoned"
    """Refused and not wanted any more, but the copy still runs: its slot is not free."""

    WIPING = "wiping"
    """Nobody reads the slot any more; where slots are wiped, zeros are written over it."""

    OVER = "over"
    """The slot, if it had one, is free."""


WAITING, GATHERING, PACKED = SlotState.WAITING, SlotState.GATHERING, SlotState.PACKED
ABANDONED, WIPING, OVER = SlotState.ABANDONED, SlotState.WIPING, SlotState.OVER


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """Bounds of the table; ``max_gathers`` run at once, ``max_waiting`` wait over all leases.

    ``wipe`` says that a slot is zeroed before it is free.
    """

    num_slots: int = 16
    slot_bytes: int = 8 << 20
    max_gathers: int = 1
    max_waiting: int = 1024
    max_slot_lease_s: float = 30.0
    max_retired: int = 256
    max_retired_bytes: int = 32 << 20
    wipe: bool = False

    @property
    def max_slots_of_a_lease(self) -> int:
        """Half of them, so that a reader that stopped leaves some; but 2, as packing pipelines."""
        return min(self.num_slots, max(2, self.num_slots // 2))


Context = AnyContext[SlotLimits]


@dataclass(slots=True)
class SlotEntry:
    """One box; ``slot_id`` names this use of a slot and no other."""

    slot_id: int
    asked: ev.SlotWanted
    slot_lease_s: float
    expires_at: float
    state: SlotState = WAITING
    slot: int | None = None
    story: Story = field(default_factory=Story, compare=False)

    @property
    def key(self) -> int:
        """Names the box in the table."""
        return self.slot_id

    @property
    def is_over(self) -> bool:
        """Whether its slot is free."""
        return self.state is OVER

    @property
    def due_at(self) -> float | None:
        """When its lease ends; None while only a copy or a wipe counts."""
        return None if self.state in (ABANDONED, WIPING) else self.expires_at

    def retire(self) -> None:
        """Keep neither the memory that it was copied from nor the request."""
        self.asked = replace(self.asked, work=None, reply_to=None)


Commands = list[ev.Command]


def start(pack: SlotEntry, event: ev.TurnCame, _: Context) -> Commands:
    """The slot is this box's from now on."""
    pack.state, pack.slot = GATHERING, event.slot
    return [ev.StartGather(pack.slot_id, event.slot, pack.asked.work, pack.asked.turn)]


def end_gather(pack: SlotEntry, event: ev.GatherEnded, at: Context) -> Commands:
    """The reader may read, or learns why not."""
    if event.error is not None or pack.slot is None:
        error = event.error or KVBusError("the box was gathered into no slot")
        return [ev.Refuse(pack.asked.reply_to, error), *free(pack, event, at)]
    pack.state = PACKED
    asked = pack.asked
    return [
        ev.ReplyPacked(asked.reply_to, pack.slot_id, pack.slot, asked.num_bytes, pack.slot_lease_s)
    ]


def give_up(pack: SlotEntry, event: ev.Event, _: Context) -> Commands:
    """It was not gathered yet."""
    pack.state = OVER
    return [ev.Refuse(pack.asked.reply_to, _reason(pack, event))]


def abandon(pack: SlotEntry, event: ev.Event, _: Context) -> Commands:
    """The reader need not wait for the copy; the slot has to."""
    pack.state = ABANDONED
    return [ev.Refuse(pack.asked.reply_to, _reason(pack, event))]


def free(pack: SlotEntry, _event: ev.Event, at: Context) -> Commands:
    """Nobody writes into the slot, and nothing that is read from it now is valid."""
    if at.limits.wipe and pack.slot is not None:
        pack.state = WIPING
        return [ev.StartWipe(pack.slot_id, pack.slot)]
    pack.state = OVER
    return []


def end_wipe(pack: SlotEntry, _event: ev.WipeEnded, _: Context) -> Commands:
    """Nothing is left in the slot."""
    pack.state = OVER
    return []


def ignore(_pack: SlotEntry, _event: ev.Event, _: Context) -> Commands:
    """It was said before, or by somebody who cannot know."""
    return []


def _reason(pack: SlotEntry, event: ev.Event) -> LocalError:
    match event:
        case ev.Abandoned():
            return LocalError("the reader does not wait for the box", code=ErrorCode.BUSY)
        case ev.LeaseEnded(code=code):
            return LocalError("the lease of the offer ended", code=code)
        case ev.EngineLost():
            return LocalError("a process of the engine ended", code=ErrorCode.ENGINE_LOST)
        case ev.Stopped():
            return LocalError("the agent stops", code=ErrorCode.CLOSED)
    return LocalError(
        f"the box was not gathered within its slot lease of {pack.slot_lease_s} s",
        code=ErrorCode.TIMEOUT,
        slot_lease_s=pack.slot_lease_s,
    )


TRANSITIONS: Mapping[tuple[SlotState, type[ev.Event]], Transition[SlotState]] = {
    (WAITING, ev.TurnCame): Transition(start, (GATHERING,)),
    (WAITING, ev.GivenBack): Transition(ignore, (WAITING,)),
    (WAITING, ev.Abandoned): Transition(give_up, (OVER,)),
    (WAITING, ev.LeaseEnded): Transition(give_up, (OVER,)),
    (WAITING, ev.EngineLost): Transition(give_up, (OVER,)),
    (WAITING, ev.Stopped): Transition(give_up, (OVER,)),
    (WAITING, ev.DeadlinePassed): Transition(give_up, (OVER,)),
    (GATHERING, ev.GatherEnded): Transition(end_gather, (PACKED, WIPING, OVER)),
    (GATHERING, ev.GivenBack): Transition(ignore, (GATHERING,)),
    (GATHERING, ev.Abandoned): Transition(abandon, (ABANDONED,)),
    (GATHERING, ev.LeaseEnded): Transition(abandon, (ABANDONED,)),
    (GATHERING, ev.EngineLost): Transition(abandon, (ABANDONED,)),
    (GATHERING, ev.Stopped): Transition(abandon, (ABANDONED,)),
    (GATHERING, ev.DeadlinePassed): Transition(abandon, (ABANDONED,)),
    (PACKED, ev.GivenBack): Transition(free, (WIPING, OVER)),
    (PACKED, ev.LeaseEnded): Transition(free, (WIPING, OVER)),
    (PACKED, ev.EngineLost): Transition(free, (WIPING, OVER)),
    (PACKED, ev.Stopped): Transition(free, (WIPING, OVER)),
    (PACKED, ev.DeadlinePassed): Transition(free, (WIPING, OVER)),
    (ABANDONED, ev.GatherEnded): Transition(free, (WIPING, OVER)),
    (ABANDONED, ev.GivenBack): Transition(ignore, (ABANDONED,)),
    (ABANDONED, ev.LeaseEnded): Transition(ignore, (ABANDONED,)),
    (ABANDONED, ev.EngineLost): Transition(ignore, (ABANDONED,)),
    (ABANDONED, ev.Stopped): Transition(ignore, (ABANDONED,)),
    (WIPING, ev.WipeEnded): Transition(end_wipe, (OVER,)),
    (WIPING, ev.GivenBack): Transition(ignore, (WIPING,)),
    (WIPING, ev.LeaseEnded): Transition(ignore, (WIPING,)),
    (WIPING, ev.EngineLost): Transition(ignore, (WIPING,)),
    (WIPING, ev.Stopped): Transition(ignore, (WIPING,)),
}
