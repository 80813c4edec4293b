"""READs in flight: choice of the next slice, and polling of handles.

A handle is released only after it has ended, or else with the process.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvbus.data.messages import MemoryKind
from kvbus.data.nixl import Handle, HandleForgotten, Nixl
from kvbus.data.slicing import Rows, Slices
from kvbus.errors import KVBusError, RemoteError
from kvbus.fair import FairQueue, Key


# Measured between two processes on 2 cores, 256 MiB in slices of 8 MiB. Two slices a READ: shared
# memory 18.2 GB/s (one: 17.8, four: 17.7); TCP 2.2 GB/s (one: 1.9, four: 2.2). Polled every 0.2 ms
# TCP reached 2.2 GB/s, without a pause 1.6: the peer needs the core. Driving progress every 0.2 ms
# costs 7% of a core (0.1 ms: 12%, 0.5 ms: 4%, 1 ms: 2%).
@dataclass(frozen=True, slots=True, kw_only=True)
class PostLimits:
    slice_bytes: int = 8 << 20
    slice_descriptors: int = 2048
    short_read_bytes: int = 1 << 20
    """READs up to this size share turns with all long ones together."""
    slices_per_read: int = 2
    bytes_per_peer: int = 64 << 20
    slices_per_peer: int = 32
    poll_s: float = 200e-6
    """Also the pause between drives of progress."""
    spin_s: float = 200e-6
    """Time without a pause after a slice moved, if few bytes are posted."""
    short_spin_s: float = 20e-6
    """The same for more than `spin_bytes`: spinning would take the peer's core."""
    spin_bytes: int = 256 << 10


@dataclass(slots=True, eq=False, kw_only=True)
class ReadJob:
    """``at_once`` holds while every slice was done in its post."""

    peer: str
    slices: Slices
    kinds: tuple[MemoryKind, MemoryKind]
    on_end: Callable[["ReadJob"], None]
    turn: Key
    outstanding: int = 0
    queued: bool = False
    at_once: bool = True
    aborted: bool = False
    error: KVBusError | None = None
    num_bytes: int = 0

    @property
    def wants_post(self) -> bool:
        return not (self.aborted or self.error or self.slices.exhausted)


@dataclass(slots=True, eq=False)
class Slice:
    job: ReadJob
    handle: Handle
    local: Rows
    num_bytes: int


@dataclass(slots=True, eq=False)
class Lane:
    waiting: FairQueue[ReadJob] = field(default_factory=FairQueue)
    posted: list[Slice] = field(default_factory=list)
    posted_bytes: int = 0


class ReadScheduler:
    def __init__(self, agent: Nixl, limits: PostLimits) -> None:
        self.agent = agent
        self._limits = limits
        self._lanes: dict[str, Lane] = {}
        self._jobs: dict[ReadJob, None] = {}
        self._forgotten: list[Slice] = []
        self._unreleased: list[Slice] = []

    @property
    def busy(self) -> bool:
        return bool(self._lanes)

    @property
    def num_handles(self) -> int:
        return sum(len(lane.posted) for lane in self._lanes.values()) + len(self._forgotten)

    @property
    def posted_bytes(self) -> int:
        posted = sum(lane.posted_bytes for lane in self._lanes.values())
        return posted + sum(item.num_bytes for item in self._forgotten)

    def _live(self) -> list[Slice]:
        posted = [item for lane in self._lanes.values() for item in lane.posted]
        return posted + self._forgotten

    def add(self, job: ReadJob) -> None:
        self._jobs[job] = None
        self.go_on(job)

    def go_on(self, job: ReadJob) -> None:
        if job in self._jobs and job.wants_post:
            self._queue(self._lanes.setdefault(job.peer, Lane()), job)
        else:
            self._end_if_terminal(job)

    def abort(self, job: ReadJob) -> None:
        job.aborted = True
        self._end_if_terminal(job)

    def reads_from(self, peer: str) -> bool:
        return any(job.peer == peer for job in self._jobs)

    def targets(self, address: int, size_bytes: int) -> bool:
        """Whether a live or unreleased handle writes into the memory."""
        end = address + size_bytes
        return any(
            bool(((s.local[:, 0] < end) & (s.local[:, 0] + s.local[:, 1] > address)).any())
            for s in (*self._live(), *self._unreleased)
        )

    def step(self) -> bool:
        """Return whether any handle moved."""
        moved = False
        for peer, lane in list(self._lanes.items()):
            moved |= self._post_next(lane)
            moved |= self._poll(lane)
            if not lane.posted and not lane.waiting:
                del self._lanes[peer]
        return moved

    def _queue(self, lane: Lane, job: ReadJob) -> None:
        may_post = job.wants_post and job.slices.is_ready
        if may_post and not job.queued and job.outstanding < self._limits.slices_per_read:
            job.queued = True
            lane.waiting.add(job.turn, job)

    # The next slice is chosen in two steps:
    #
    #     step ─┬▶ lane of peer A ─┬▶ short READs, as they came ─┐ by turns; a lane posts a slice a
    #           │                  └▶ long READs, as they came  ─┘ step, then its handles are polled
    #           └▶ lane of peer B ...
    #
    # A lane pauses when enough bytes of its peer are outstanding, so a stopped peer delays no
    # other. A READ is in its queue once, and has few slices posted. After a slice it goes to the
    # end of its queue, so long READs share the wire. A short READ waits for a slice of one long
    # READ, not of each. More urgent READs of a lane come first (`kvbus.fair`).
    def _post_next(self, lane: Lane) -> bool:
        limits = self._limits
        if len(lane.posted) >= limits.slices_per_peer or lane.posted_bytes >= limits.bytes_per_peer:
            return False
        while (taken := lane.waiting.take()) is not None:
            _key, job = taken
            job.queued = False
            if job.wants_post:
                self._post(lane, job)
                self._queue(lane, job)
                return True
        return False

    def _post(self, lane: Lane, job: ReadJob) -> None:
        local, remote, num_bytes = job.slices.take()
        try:
            handle = self.agent.prepare(job.peer, local, remote, job.kinds)
        except RemoteError as error:
            job.error = error
            self._end_if_terminal(job)
            return
        item = Slice(job, handle, local, num_bytes)
        job.outstanding += 1
        try:
            done = self.agent.post(handle, job.peer)
        except RemoteError as error:
            self._finish(lane, item, error)
            return
        if done:
            self._finish(lane, item, None)
        else:
            job.at_once = False
            lane.posted.append(item)
            lane.posted_bytes += num_bytes

    def _poll(self, lane: Lane) -> bool:
        moved = False
        for item in lane.posted[:]:
            error: RemoteError | None = None
            try:
                if not self.agent.is_done(item.handle, item.job.peer):
                    continue
            except RemoteError as caught:
                error = caught
            lane.posted.remove(item)
            lane.posted_bytes -= item.num_bytes
            self._finish(lane, item, error)
            moved = True
        return moved

    # "Not found" for a posted handle means that NIXL dropped its peer, and all state of the
    # transfer. The bytes may still land, undetected. So the slice stays outstanding: its READ does
    # not end, and its memory is not deregistered, until the process ends. After any other error
    # NIXL guarantees that the handle has ended. The READ ends with its other slices.
    def _finish(self, lane: Lane, item: Slice, error: RemoteError | None) -> None:
        job = item.job
        if isinstance(error, HandleForgotten):
            job.error = error
            self._forgotten.append(item)  # still outstanding: the READ never ends
            return
        job.outstanding -= 1
        if error is None:
            job.num_bytes += item.num_bytes
        else:
            job.error = job.error or error
        if not self.agent.release(item.handle):
            self._unreleased.append(item)
        self._queue(lane, job)
        self._end_if_terminal(job)

    def _end_if_terminal(self, job: ReadJob) -> None:
        if job not in self._jobs or job.outstanding or job.wants_post:
            return
        del self._jobs[job]
        job.on_end(job)
        job.slices.clear()  # a paused lane may keep the job
