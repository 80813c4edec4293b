"""The reads in progress: whose slice is posted next, and which handles are terminal.

Only the transport's thread calls it. A handle is released, and its memory let go, only when it is
terminal; what never becomes so is held here for ever.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvbus.errors import RemoteError
from kvbus.table import FairQueue, Key
from kvbus.transport.nixl_agent import Handle, HandleForgotten, NixlAgent
from kvbus.transport.slicing import Rows, Slices
from kvbus.transport.types import MemoryKind, ReadOutcome, ReadStatus, TransportLimits

OnEnd = Callable[[ReadOutcome], None]


@dataclass(slots=True, eq=False, kw_only=True)
class ReadJob:
    """A read as the scheduler sees it; short ones take turns with long ones by ``turn``.

    It is ``at_once`` as long as each slice has ended in its post.
    """

    peer: str
    slices: Slices
    kinds: tuple[MemoryKind, MemoryKind]
    on_end: OnEnd
    turn: Key
    outstanding: int = 0
    queued: bool = False
    at_once: bool = True
    aborted: bool = False
    ended: bool = False
    error: RemoteError | None = None
    num_bytes: int = 0
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
            status=status, error=self.error, num_bytes=self.num_bytes, num_slices=self.num_slices
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


class ReadScheduler:
    """Posts slices of all reads in fair turn, peer by peer and read by read."""

    def __init__(
        self, agent: NixlAgent, limits: TransportLimits, on_end: Callable[[ReadJob], None]
    ) -> None:
        self.agent = agent
        self._limits = limits
        self._on_end = on_end
        self.held = False
        """Whether nothing is posted; what was posted goes on."""
        self._lanes: dict[str, Lane] = {}
        self._jobs: dict[ReadJob, None] = {}
        self._forgotten: list[Slice] = []
        self._unreleased: list[Slice] = []

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._lanes)

    @property
    def num_handles(self) -> int:
        """Posted handles that are not terminal, those that NIXL forgot included."""
        return sum(len(lane.posted) for lane in self._lanes.copy().values()) + len(self._forgotten)

    @property
    def num_unreleased(self) -> int:
        """Handles that NIXL forgot, or did not take back."""
        return len(self._forgotten) + len(self._unreleased)

    @property
    def posted_bytes(self) -> int:
        """Bytes under handles that are not terminal."""
        posted = sum(lane.posted_bytes for lane in self._lanes.copy().values())
        return posted + sum(item.num_bytes for item in self._forgotten)

    def _live(self) -> list[Slice]:
        """What may still land."""
        posted = [item for lane in self._lanes.values() for item in lane.posted]
        return posted + self._forgotten

    def add(self, job: ReadJob) -> None:
        """Take a read; one of nothing ends at once."""
        self._jobs[job] = None
        if job.wants_post:
            self._queue(self._lanes.setdefault(job.peer, Lane()), job)
        else:
            self._end_if_terminal(job)

    def abort(self, job: ReadJob) -> None:
        """Post nothing more of a read; it ends when what was posted is terminal."""
        job.aborted = True
        self._end_if_terminal(job)

    def abort_all(self) -> None:
        """`abort` of every read."""
        for job in list(self._jobs):
            self.abort(job)

    @property
    def only_aborted(self) -> bool:
        """Whether every handle that is not terminal is of a read that nobody wants."""
        return all(job.aborted for job in self._jobs if job.outstanding)

    def hand_over(self, error: RemoteError) -> list[ReadJob]:
        """End each read that has handles; the others, which may go on at another scheduler.

        Nothing may drive the agent from here on: those handles are ended by that alone. ``error``
        is for who has not aborted a read.
        """
        left = [job for job in self._jobs if not job.outstanding]
        for job in [job for job in self._jobs if job.outstanding]:
            job.outstanding = 0
            job.error = job.error or (None if job.aborted else error)
            self._end_if_terminal(job)
        self._jobs.clear()
        for job in left:
            job.queued = False
        return left

    def destroy_agent(self) -> None:
        """End NIXL's agent, and with it all that is posted; nothing may be called any more."""
        for item in (*self._live(), *self._unreleased):
            item.handle = None  # each of them keeps the agent
        self.agent.destroy()

    def in_flight_to(self, peer: str) -> bool:
        """Whether a handle to the peer is not terminal."""
        return any(item.job.peer == peer for item in self._live())

    def targets(self, address: int, size_bytes: int) -> bool:
        """Whether a handle that is not terminal, or was not released, writes into the memory."""
        end = address + size_bytes
        return any(
            bool(((s.local[:, 0] < end) & (s.local[:, 0] + s.local[:, 1] > address)).any())
            for s in (*self._live(), *self._unreleased)
        )

    def step(self) -> bool:
        """Post at most one slice a peer and look at every handle; whether anything moved."""
        moved = False
        for peer, lane in list(self._lanes.items()):
            moved |= self._post_next(lane)
            moved |= self._poll(lane)
            if not lane.posted and not lane.waiting:
                del self._lanes[peer]
        return moved

    def _queue(self, lane: Lane, job: ReadJob) -> None:
        if job.wants_post and not job.queued and job.outstanding < self._limits.slices_per_read:
            job.queued = True
            lane.waiting.add(job.turn, job)

    # Who posts next is decided twice:
    #
    #     step ─┬▶ lane of peer A ─┬▶ short reads, as they came ─┐ in turn; a lane posts one slice a
    #           │                  └▶ long reads, as they came  ─┘ step, then its handles are polled
    #           └▶ lane of peer B ...
    #
    # A lane is held up when its peer has enough outstanding, so a peer that is stopped holds up
    # nobody else. A read waits in its lane once at a time and has few slices posted: after a slice
    # it goes to the end of its queue, so long reads share the wire, and a short one waits for a
    # slice of one long read, not of each. More urgent reads of a lane come first (`kvbus.table`).
    def _post_next(self, lane: Lane) -> bool:
        limits = self._limits
        if self.held:
            return False
        if len(lane.posted) >= limits.slices_per_peer or lane.posted_bytes >= limits.bytes_per_peer:
            return False
        while (taken := lane.waiting.take()) is not None:
            _, job = taken
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

    # "Not found" for a handle that was posted means that NIXL dropped its peer, and with it all
    # that it knew of the transfer. The bytes may still land, and nothing will ever say that they
    # did. So the slice stays outstanding for ever: its read does not end, `targets` says that its
    # memory is in use, and that is neither deregistered nor given back. Any other error is NIXL's
    # word that the handle is terminal, and the read ends once its other slices have.
    def _finish(self, lane: Lane, item: Slice, error: RemoteError | None) -> None:
        job = item.job
        if isinstance(error, HandleForgotten):
            job.error = error
            self._forgotten.append(item)  # still outstanding: the read never ends
            return
        job.outstanding -= 1
        if error is None:
            job.num_bytes += item.num_bytes
            job.num_slices += 1
        else:
            job.error = job.error or error
        if not self.agent.release(item.handle):
            self._unreleased.append(item)
        self._queue(lane, job)
        self._end_if_terminal(job)

    def _end_if_terminal(self, job: ReadJob) -> None:
        if job.ended or job.outstanding or job.wants_post:
            return
        job.ended = True
        del self._jobs[job]
        self._on_end(job)
        job.clear()
