"""Owns the reads of one peer: those that wait for their turn, and the slices that are posted."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvbus.errors import RemoteError
from kvbus.table import FairQueue, Key
from kvbus.transport.nixl_agent import Handle
from kvbus.transport.slicing import Rows, Slices
from kvbus.transport.types import MemoryKind, ReadOutcome, ReadStatus


@dataclass(slots=True, eq=False, kw_only=True)
class ReadJob:
    """A read as the scheduler sees it; short ones take turns with long ones by ``turn``."""

    peer: str
    slices: Slices
    kinds: tuple[MemoryKind, MemoryKind]
    on_end: Callable[[ReadOutcome], None]
    turn: Key
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


@dataclass(slots=True, eq=False)
class Lane:
    """The reads from one peer: a stopped peer holds up nobody but itself."""

    waiting: FairQueue[ReadJob] = field(default_factory=FairQueue)
    posted: list[Slice] = field(default_factory=list)
    posted_bytes: int = 0
