"""Owns the reads of one peer: those that wait for their turn, and the slices that are posted."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvbus.errors import RemoteError
from kvbus.table import Turns, UrgentFirst
from kvbus.transport.nixl_agent import Handle
from kvbus.transport.slicing import Rows, Slices
from kvbus.transport.types import MemoryKind, ReadOutcome, ReadStatus


@dataclass(slots=True, eq=False, kw_only=True)
class ReadJob:
    """A read as the scheduler sees it."""

    peer: str
    slices: Slices
    kinds: tuple[MemoryKind, MemoryKind]
    on_end: Callable[[ReadOutcome], None]
    priority: int = 0
    outstanding: int = 0
    queued: bool = False
    aborted: bool = False
    ended: bool = False
    error: RemoteError | None = None
    num_bytes: int = 0
    num_descriptors: int = 0
    num_slices: int = 0

    @property
    def wants_post(self) -> bool:
        """Whether a further slice of it should be posted."""
        return not (self.aborted or self.error or self.slices.exhausted)

    # A job outlives its read: the `Read` of its caller refers to it, and so does the queue of a
    # lane that is held up. Its callback refers to the caller, who holds the `Read`:
    #
    #     caller ──▶ Read ──▶ job ──▶ on_end ──▶ caller
    #
    # Such a circle would keep the descriptors, megabytes of a long read, until the garbage
    # collector comes; and so would the traceback of an error.
    def clear(self) -> None:
        """Let go of descriptors, callback and error, once it has ended."""
        self.slices.clear()
        self.on_end, self.error = _no_outcome, None

    def outcome(self) -> ReadOutcome:
        """What became of it; only asked once nothing of it is outstanding."""
        status = ReadStatus.DONE
        if self.error:
            status = ReadStatus.FAILED
        elif self.aborted:
            status = ReadStatus.ABORTED
        return ReadOutcome(
            status=status,
            error=self.error,
            num_bytes=self.num_bytes,
            num_descriptors=self.num_descriptors,
            num_slices=self.num_slices,
        )


def _no_outcome(_: ReadOutcome) -> None:
    """The callback of a read that has ended."""


@dataclass(slots=True, eq=False)
class Slice:
    """A part of a read that is posted."""

    job: ReadJob
    handle: Handle
    local: Rows
    num_bytes: int


class _FairQueue:
    """Two queues that are served alternately, so a short read waits for one long slice at most.

    While one has a more urgent read than the other, it comes first in all but the fair turns.
    """

    __slots__ = ("_long", "_short", "_short_is_next", "_turns")

    def __init__(self) -> None:
        self._short: UrgentFirst[ReadJob] = UrgentFirst()
        self._long: UrgentFirst[ReadJob] = UrgentFirst()
        self._short_is_next = True
        self._turns = Turns()

    def __bool__(self) -> bool:
        return bool(self._short or self._long)

    def add(self, item: ReadJob, *, short: bool) -> None:
        """Put ``item`` at the end of its queue."""
        (self._short if short else self._long).add(item, item.priority)

    def take(self) -> ReadJob | None:
        """The next one, or None when nobody waits."""
        first, second = self._short, self._long
        if not self._short_is_next:
            first, second = second, first
        if not first and not second:
            return None
        is_fair = self._turns.next_is_fair()
        if not first or (second and not is_fair and second.priority > first.priority):
            first = second
        self._short_is_next = first is self._long
        return first.take(fair=is_fair)


@dataclass(slots=True, eq=False)
class Lane:
    """The reads from one peer: a stopped peer holds up nobody but itself."""

    waiting: _FairQueue = field(default_factory=_FairQueue)
    posted: list[Slice] = field(default_factory=list)
    posted_bytes: int = 0
