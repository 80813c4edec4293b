"""What can happen to reads, and what the agent is told to do about it.

``key`` names a read, ``leg`` is one of its legs. Each command that asks for an answer gets exactly
one, whatever became of the read meanwhile.
"""

from collections.abc import Hashable

from kvbus.errors import KVBusError
from kvbus.table.events import DeadlinePassed, Stopped, Value
from kvbus_decode.read.leg import Leg

__all__ = [
    "AbortCopy",
    "AbortRead",
    "AskDelegate",
    "AskDigests",
    "AskPack",
    "ChunkEnded",
    "ChunkWanted",
    "Command",
    "CompareEnded",
    "CopyEnded",
    "DeadlinePassed",
    "DelegateEnded",
    "DigestsCame",
    "EngineGone",
    "Event",
    "LegDue",
    "LegEvent",
    "LegStopped",
    "OthersOver",
    "PackFailed",
    "PostRead",
    "ReadEnded",
    "ReadStopped",
    "RecycleTransport",
    "ReleaseSlots",
    "SlotGranted",
    "SlotPacked",
    "StartCompare",
    "StartCopy",
    "StopDelegate",
    "Stopped",
]


class ChunkWanted(Value, frozen=True):
    """Read a chunk by these legs, into the blocks of ``engine``; then ``last_legs``, which zero.

    ``deadline`` is absolute, None without; ``path`` is only passed on to `ChunkEnded`. Legs of a
    greater ``priority`` are given slots of ours first.
    """

    key: Hashable
    engine: Hashable
    legs: tuple[Leg, ...]
    last_legs: tuple[Leg, ...] = ()
    path: str = ""
    deadline: float | None = None
    priority: int = 0


class SlotPacked(Value, frozen=True):
    """The box of a leg lies in slot ``slot_id`` at its holder, for ``slot_lease_s`` since asked."""

    key: Hashable
    leg: Leg
    slot_id: int
    slot_lease_s: float


class PackFailed(Value, frozen=True):
    """The box of a leg was not gathered."""

    key: Hashable
    leg: Leg
    error: KVBusError


class LegDue(Value, frozen=True):
    """The leg may start; the table itself says when."""


class SlotGranted(Value, frozen=True):
    """A slot of ours is the leg's from now on; the table itself says when."""

    slot: int


class LegStopped(Value, frozen=True):
    """The read of the leg has failed or was stopped; the table itself says so."""


class ReadEnded(Value, frozen=True):
    """Nothing of the READ is in flight any more; ``error`` is None when all bytes have landed."""

    key: Hashable
    leg: Leg
    num_bytes: int = 0
    error: KVBusError | None = None


class CopyEnded(Value, frozen=True):
    """Nothing copies for the leg any more; ``error`` is None when all of it was copied.

    ``num_bytes`` were read by copying alone, out of memory of this machine.
    """

    key: Hashable
    leg: Leg
    num_bytes: int = 0
    error: KVBusError | None = None


class DelegateEnded(Value, frozen=True):
    """The other agent writes no more, or is gone."""

    key: Hashable
    leg: Leg
    num_bytes: int = 0
    path: str = ""
    error: KVBusError | None = None


class DigestsCame(Value, frozen=True):
    """The digests of the leg's holder are here."""

    key: Hashable
    leg: Leg


class OthersOver(Value, frozen=True):
    """All bytes of the read are in the blocks; the table itself says so to what compares them."""


class CompareEnded(Value, frozen=True):
    """Nothing of the comparison runs, or no digests came; without ``error`` all are equal."""

    key: Hashable
    leg: Leg
    error: KVBusError | None = None


class ReadStopped(Value, frozen=True):
    """Nobody wants the chunk any more, because of ``error``."""

    key: Hashable
    error: KVBusError


class EngineGone(Value, frozen=True):
    """The engine whose blocks are written is lost: what it has elsewhere is no reason to wait."""

    engine: Hashable
    error: KVBusError


LegEvent = (
    SlotPacked | PackFailed | ReadEnded | CopyEnded | DelegateEnded | DigestsCame | CompareEnded
)
Event = ChunkWanted | LegEvent | ReadStopped | EngineGone | Stopped | DeadlinePassed


class AskPack(Value, frozen=True):
    """Ask the holder to gather the leg's box; answer `SlotPacked` or `PackFailed`.

    ``done`` are slots there that are read, and come back with this request.
    """

    key: Hashable
    leg: Leg
    done: tuple[int, ...]


class ReleaseSlots(Value, frozen=True):
    """Give slots back to their holder; when that fails their lease ends by itself."""

    source: Hashable
    slot_ids: tuple[int, ...]


class PostRead(Value, frozen=True):
    """READ into the engine's blocks, or into the leg's slot of ours; answer `ReadEnded`."""

    key: Hashable
    leg: Leg


class StartCopy(Value, frozen=True):
    """Copy into the engine's blocks: out of the leg's slot of ours, out of memory that is mapped
    here, or zeros; answer `CopyEnded`.
    """

    key: Hashable
    leg: Leg


class AskDelegate(Value, frozen=True):
    """Have another agent of the engine read the chunk for its ranks; answer `DelegateEnded`."""

    key: Hashable
    leg: Leg


class AskDigests(Value, frozen=True):
    """Ask the holder for digests of the leg's box; answer `DigestsCame` or `CompareEnded`."""

    key: Hashable
    leg: Leg


class StartCompare(Value, frozen=True):
    """Make digests of the engine's blocks, and compare; answer `CompareEnded`."""

    key: Hashable
    leg: Leg


class AbortRead(Value, frozen=True):
    """Post nothing more; `ReadEnded` follows when what was posted is terminal."""

    leg: Leg


class RecycleTransport(Value, frozen=True):
    """Aborted READs do not end: end them from outside; `ReadEnded` follows for each."""


class AbortCopy(Value, frozen=True):
    """Begin no further part of a copy or a comparison; its end follows when none runs."""

    leg: Leg


class StopDelegate(Value, frozen=True):
    """Ask the other agent to stop; `DelegateEnded` follows when it has."""

    key: Hashable
    leg: Leg


class ChunkEnded(Value, frozen=True):
    """Nothing can write into the engine's blocks for this read any more; said once.

    ``error`` is None when all bytes are there, which took ``seconds``; zeroing and comparing are
    not counted.
    """

    key: Hashable
    num_bytes: int
    path: str
    seconds: float
    error: KVBusError | None = None


Command = (
    AskPack
    | ReleaseSlots
    | PostRead
    | StartCopy
    | AskDelegate
    | AskDigests
    | StartCompare
    | AbortRead
    | RecycleTransport
    | AbortCopy
    | StopDelegate
    | ChunkEnded
)
