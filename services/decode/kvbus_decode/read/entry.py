"""One read: a chunk on its way into the ranks that are here, by all of its legs."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvbus.errors import ErrorCode, KVBusError, RemoteError
from kvbus.table import Story
from kvbus_decode.read import events as ev
from kvbus_decode.read.leg import Leg, LegState, Stage


class DelegatedKey(NamedTuple):
    """Names the reads for a fetch of another agent, which calls it ``fetch_id``."""

    engine_id: str
    fetch_id: str


class ReadState(StrEnum):
    """Where a read is; draining is an end, but for what can still write."""

    READING = "reading"
    DRAINING = "draining"
    OVER = "over"


@dataclass(slots=True, eq=False)
class ReadEntry:
    """One read; ``live`` are the legs that were started and are not over.

    ``waiting`` are legs that wait for their turn, ``read_slots`` slots of each source that are read
    and go back with the next request to it. From ``recycle_at`` on, READs that still drain never
    end by themselves.
    """

    wanted: ev.ChunkWanted
    started_at: float
    story: Story
    state: ReadState = ReadState.READING
    live: dict[Leg, None] = field(default_factory=dict)
    waiting: deque[Leg] = field(init=False)
    last_legs: tuple[Leg, ...] = field(init=False)
    read_slots: dict[Hashable, list[int]] = field(default_factory=dict)
    num_bytes: int = 0
    path: str = field(init=False)
    landed_at: float | None = None
    recycle_at: float = 0.0
    error: KVBusError | None = None

    def __post_init__(self) -> None:
        self.waiting, self.last_legs = deque(self.wanted.legs), self.wanted.last_legs
        self.path = self.wanted.path

    @property
    def key(self) -> Hashable:
        """Names the read."""
        return self.wanted.key

    @property
    def is_over(self) -> bool:
        """Whether `ChunkEnded` was said."""
        return self.state is ReadState.OVER

    @property
    def due_at(self) -> float | None:
        """The chunk's own, or the end of the first lease of a slot that is still to be read.

        While it drains, the end of our patience with its READs.
        """
        if self.state is not ReadState.READING:
            return self.recycle_at if self.has_reads else None
        times = [leg.slot_expires_at for leg in self.live if leg.slot_expires_at is not None]
        if self.wanted.deadline is not None:
            times.append(self.wanted.deadline)
        return min(times, default=None)

    @property
    def has_reads(self) -> bool:
        """Whether a READ of it is not terminal."""
        return any(leg.state is LegState.READING for leg in self.live)

    @property
    def has_landed(self) -> bool:
        """Whether no leg is left that brings bytes."""
        return not self.waiting and all(leg.only_compares for leg in self.live)

    def next_leg(self, most_packed: int) -> Leg | None:
        """The leg to start now, taken from those that wait; ``most_packed`` are live at a time."""
        if not self.waiting:
            return None
        if Stage.PACK in self.waiting[0].stages:
            num_packed = sum(Stage.PACK in leg.stages for leg in self.live)
            if num_packed >= most_packed:
                return None
        return self.waiting.popleft()

    def release_slots(self) -> list[ev.Command]:
        """Give back the slots that were read of sources to which no further request goes."""
        sources = [
            source
            for source in self.read_slots
            if not any(leg.source == source for leg in self.waiting)
        ]
        return [ev.ReleaseSlots(source, tuple(self.read_slots.pop(source))) for source in sources]

    def lateness(self, now: float) -> KVBusError:
        """Why the read fails at its deadline."""
        if self.wanted.deadline is not None and self.wanted.deadline <= now:
            message = "the chunk was not read within its deadline"
            return RemoteError(message, code=ErrorCode.TIMEOUT)
        message = "the lease of a staging slot ended before it was read"
        return RemoteError(message, code=ErrorCode.LEASE_EXPIRED)

    def retire(self) -> None:
        """Keep no legs, whose work holds descriptors and memory."""
        wanted = self.wanted
        self.wanted = ev.ChunkWanted(wanted.key, wanted.engine, ())
        self.last_legs = ()
