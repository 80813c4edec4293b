"""Owns which READs the caller's thread posts itself, and does so."""

import time

from kvbus.transport.lane import ReadJob
from kvbus.transport.scheduler import ReadScheduler
from kvbus.transport.types import TransportLimits

FIRST_ELSEWHERE, SLOW_ELSEWHERE = 1, 16


# Two wake-ups of threads cost more than a short READ. So one is posted by who asks for it, the
# event loop of an agent, if the transport's thread does nothing then. That holds the loop for
#
#     the post, which may copy      here_bytes in here_descriptors: some 100 µs
#     looks at the handle           here_s; then the thread goes on with it
#
# and never for a connection: the first READ from each peer, which may connect to it, is the
# thread's. So are some after one that took longer, as it does over TCP.
class ShortReads:
    """What is known of the peers of one NIXL agent: how long short READs from each take."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._num_elsewhere: dict[str, int] = {}
        """How many READs from each peer are left to the thread before one is done here."""

    def may_be_here(self, job: ReadJob) -> bool:
        """Whether the caller's thread may do it."""
        limits = self._limits
        return (
            job.slices.num_bytes <= limits.here_bytes
            and job.slices.num_rows <= limits.here_descriptors
            and job.kinds == ("DRAM", "DRAM")
            and not self._num_elsewhere.get(job.peer, FIRST_ELSEWHERE)
        )

    def read(self, job: ReadJob, scheduler: ReadScheduler) -> None:
        """Post it, and look for its end for a while."""
        scheduler.add(job)
        scheduler.step()
        until = time.perf_counter() + self._limits.here_s
        while not job.ended and time.perf_counter() < until:
            scheduler.agent.progress()
            scheduler.step()
        if not job.ended:
            self._num_elsewhere[job.peer] = SLOW_ELSEWHERE

    def note_done(self, peer: str) -> None:
        """A READ from the peer has ended well."""
        num_elsewhere = self._num_elsewhere.get(peer, FIRST_ELSEWHERE)
        self._num_elsewhere[peer] = max(0, num_elsewhere - 1)

    def forget(self, peer: str) -> None:
        """The next one may have to connect."""
        self._num_elsewhere.pop(peer, None)
