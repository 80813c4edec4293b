"""What the transport takes in and hands out: limits, outcomes, counts."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from kvbus.errors import RemoteError

MemoryKind = Literal["DRAM", "VRAM"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """How much is posted at once, and how often NIXL is asked.

    Measured between two processes on 2 cores, 256 MiB in slices of 8 MiB. Two slices a read:
    shared memory 18.2 GB/s (one: 17.8, four: 17.7); TCP 2.2 GB/s (one: 1.9, four: 2.2). Polled
    every 0.2 ms TCP reached 2.2 GB/s, without a pause 1.6: the peer needs the core. Driving
    progress every 0.2 ms costs 7% of a core (0.1 ms: 12%, 0.5 ms: 4%, 1 ms: 2%).
    """

    slice_bytes: int = 8 << 20
    slice_descriptors: int = 2048
    short_read_bytes: int = 1 << 20
    """A read of no more than this takes turns with the long ones, not with each of them."""
    slices_per_read: int = 2
    bytes_per_peer: int = 64 << 20
    """A peer gets no further slice while this much of it is outstanding."""
    slices_per_peer: int = 32
    max_reads: int = 4096
    max_commands: int = 16384
    poll_s: float = 200e-6
    """Pause between two looks at handles, or two drives of demanded progress."""
    spin_s: float = 200e-6
    """How long handles are polled without a pause after something moved, when little is posted."""
    short_spin_s: float = 20e-6
    """The same when more than `spin_bytes` are posted: spinning would take the peer's core."""
    spin_bytes: int = 256 << 10
    here_bytes: int = 0
    """A READ of so many bytes may be done on the caller's thread, which waits for it briefly."""
    here_descriptors: int = 32
    here_s: float = 100e-6
    """How long the caller's thread looks for the end of such a READ after its post."""


@dataclass(frozen=True, slots=True)
class Registration:
    """Local memory that NIXL may read into and that peers may read."""

    key: int
    address: int
    size_bytes: int
    device: int
    memory: MemoryKind


class ReadStatus(StrEnum):
    """How a read ended. Whatever it says, nothing of the read is in flight any more."""

    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOutcome:
    """What became of a read: bytes that landed, and the slices that they came in."""

    status: ReadStatus
    error: RemoteError | None
    num_bytes: int
    num_slices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportStats:
    """Counts for metrics, read without a lock: each is right, together they may be a step apart."""

    outstanding_reads: int
    outstanding_handles: int
    outstanding_bytes: int
    registered_bytes: int
    peers: int
    progress_tokens: int
    progress_calls: int
    """Passes of the transport's thread: it does not grow while nothing needs progress."""
    unreleased_handles: int
    """Handles of which NIXL lost sight; their memory is not given back."""
    retired_agents: int
    """How often NIXL's agent was made anew."""
    retired_at: float
    """When that was last, in seconds since 1970; 0 when it never was."""
