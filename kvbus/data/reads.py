"""READs from peers, and the progress of NIXL."""

from collections.abc import Callable, Iterable

from kvbus.data.messages import MemoryKind
from kvbus.data.nixl import Nixl, Registration
from kvbus.data.scheduler import PostLimits, ReadJob, ReadScheduler
from kvbus.data.slicing import Slices
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.fair import Key
from kvbus.planning import Reads

COPIED_S = 25e-6
"""A longer pass has copied: UCX copies within progress, and a pause would waste time."""


class NixlReads:
    def __init__(self, agent: Nixl, limits: PostLimits, clock: Callable[[], float]) -> None:
        self.agent, self._limits, self._clock = agent, limits, clock
        self._scheduler = ReadScheduler(agent, limits)
        self._moved_at = 0.0
        self.is_driven = False

    def read(
        self,
        peer: str,
        rows: Reads,
        *,
        kinds: tuple[MemoryKind, MemoryKind],
        priority: int,
        on_end: Callable[[ReadJob], None],
        num_parts: int = 1,
    ) -> ReadJob:
        limits = self._limits
        slices = Slices(
            slice_bytes=limits.slice_bytes,
            slice_rows=limits.slice_descriptors,
            num_parts=num_parts,
        )
        slices.add(rows.local, rows.remote)
        is_short = num_parts == 1 and rows.num_bytes <= limits.short_read_bytes
        job = ReadJob(
            peer=peer,
            slices=slices,
            kinds=kinds,
            on_end=on_end,
            turn=Key(is_short, priority),
        )
        self._scheduler.add(job)
        return job

    def go_on(self, job: ReadJob, planned: Reads | KVBusError) -> None:
        if isinstance(planned, KVBusError):
            job.error = job.error or planned
        else:
            job.slices.add(planned.local, planned.remote)
        self._scheduler.go_on(job)

    def abort(self, job: ReadJob) -> None:
        self._scheduler.abort(job)

    def reads_from(self, peer: str) -> bool:
        return self._scheduler.reads_from(peer)

    def deregister(self, registrations: Iterable[Registration]) -> None:
        """Raises `LocalError` (``busy``) while a handle writes into the memory."""
        registrations = list(registrations)
        for one in registrations:
            if self._scheduler.targets(one.address, one.size_bytes):
                raise LocalError("a handle still writes into the memory", code=ErrorCode.BUSY)
        for one in registrations:
            self.agent.deregister(one)

    # UCX moves bytes only while it is driven. NIXL's own thread would burn a core for that, and
    # spinning takes the core that the peer's copy needs. Hence these pauses:
    #
    #     nothing driven, nothing posted       no limit: a message wakes the thread
    #     progress driven (peers read from     poll_s: a target is driven by its own calls only, an
    #       here)                              idle one never answers
    #     handles posted, one moved or was     0: the next one is about to end (for spin_s if few
    #       copied just now                    bytes are posted, else for short_spin_s)
    #     handles posted, quiet for a while    poll_s
    def pause_s(self) -> float | None:
        """None means no limit."""
        limits, scheduler = self._limits, self._scheduler
        if scheduler.busy:
            since = self._clock() - self._moved_at
            few = scheduler.posted_bytes <= limits.spin_bytes
            spin_s = limits.spin_s if few else limits.short_spin_s
            return 0.0 if since < spin_s else limits.poll_s
        return limits.poll_s if self.is_driven else None

    def step(self) -> None:
        scheduler = self._scheduler
        if not (self.is_driven or scheduler.busy):
            return
        began = self._clock()
        if self.is_driven or scheduler.num_handles:
            self.agent.progress()
        moved, now = scheduler.step(), self._clock()
        if moved or (now - began > COPIED_S and scheduler.busy):
            self._moved_at = now
