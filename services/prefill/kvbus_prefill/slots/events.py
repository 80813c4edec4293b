"""What can happen to the staging slots, and what the agent is told to do about it.

Refuses behaviour: these are values. `kvbus_prefill.slots.table` says which event leads to which
command.
A ``lease`` is any key: (offer id, epoch) of an offer here, the reader's own key for one elsewhere.
"""

from collections.abc import Hashable

from kvbus.errors import ErrorCode, KVBusError
from kvbus.table import Key
from kvbus.table.events import DeadlinePassed, EngineLost, Refuse, Stopped, Value

__all__ = [
    "Abandoned",
    "Command",
    "DeadlinePassed",
    "EngineLost",
    "Event",
    "GatherEnded",
    "GivenBack",
    "LeaseEnded",
    "Refuse",
    "ReplyPacked",
    "SlotWanted",
    "StartGather",
    "StartWipe",
    "Stopped",
    "TurnCame",
    "WipeEnded",
]


class SlotWanted(Value, frozen=True):
    """A reader wants ``num_bytes`` gathered into a slot; ``work`` is what the agent needs for it.

    ``reader`` is the name of the session that asked: only it can give the slot back.
    """

    lease: Hashable
    reader: str
    engine_id: str
    num_bytes: int
    slot_lease_s: float
    work: object
    reply_to: object
    priority: int = 0
    offer_id: str = ""

    @property
    def turn(self) -> Key:
        """What it waits under, for a slot and then for a thread."""
        return Key(self.lease, self.priority)


class TurnCame(Value, frozen=True):
    """A slot and a thread are free, and no other lease comes first."""

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


class Abandoned(Value, frozen=True):
    """A reader that waits for its box has been told to ask again, or is not there any more."""

    lease: Hashable
    reply_to: object


class LeaseEnded(Value, frozen=True):
    """The lease of an offer is over: what was gathered under it is not valid any more.

    ``code`` says how it ended.
    """

    lease: Hashable
    code: ErrorCode


Event = (
    SlotWanted
    | TurnCame
    | GatherEnded
    | WipeEnded
    | GivenBack
    | Abandoned
    | LeaseEnded
    | EngineLost
    | Stopped
    | DeadlinePassed
)


class StartGather(Value, frozen=True):
    """Copy the box of ``work`` into slot number ``slot``, and tell when that has ended."""

    slot_id: int
    slot: int
    work: object
    turn: Key


class StartWipe(Value, frozen=True):
    """Write zeros over slot number ``slot``, and tell when that has ended."""

    slot_id: int
    slot: int


class ReplyPacked(Value, frozen=True):
    """Tell the reader that its box lies in slot number ``slot``."""

    reply_to: object
    slot_id: int
    slot: int
    num_bytes: int
    slot_lease_s: float


Command = StartGather | StartWipe | ReplyPacked | Refuse
