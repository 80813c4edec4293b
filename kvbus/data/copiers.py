"""Threads that copy KV memory, in fair turns."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

from kvbus.errors import KVBusError
from kvbus.fair import FairQueue, Key

LEAST_PART_BYTES = 1 << 20
"""A part of this size takes longer than to wake another thread."""

Part = Callable[[], int]
"""Returns the bytes that it moved."""


@dataclass(slots=True, eq=False)
class CopyJob:
    turn: Key
    plan: Callable[[], Iterable[Part]]
    on_end: Callable[["CopyJob"], None]
    parts: deque[Part] = field(default_factory=deque)
    moved: list[tuple[int, float]] = field(default_factory=list)
    """Bytes and seconds of each completed part."""
    num_threads: int = 1
    error: KVBusError | None = None

    def stop(self, error: KVBusError) -> None:
        """``on_end`` follows once no part runs."""
        self.error = self.error or error

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self.moved)

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.moved)

    def make_parts(self) -> int:
        self.parts.extend(self.plan())
        return 0


# The queue holds each job once for each thread that may serve it. A thread takes a job, does one
# part, and appends the job to those with the same key:
#
#     queue   [large] [small] [large]    small waits for one part of each owner before it,
#                │                       however many more these have
#                └─ one part ─▶ to the end, or out when empty
#
# The last thread of a job reports its end.
class Copiers:
    def __init__(
        self,
        threads: Executor,
        num_threads: int,
        *,
        clock: Callable[[], float],
        to_error: Callable[[Exception], KVBusError],
    ) -> None:
        self._threads, self._num_threads = threads, num_threads
        self._clock, self._to_error = clock, to_error
        self._lock = Lock()
        self._waiting: FairQueue[Callable[[], None]] = FairQueue()

    def part_bytes(self, num_bytes: int, *, most: int) -> int:
        return min(most, max(LEAST_PART_BYTES, -(-num_bytes // self._num_threads)))

    # A part cannot be stopped, and its thread uses addresses. So only the end of the job is
    # reported: an earlier reply would free a slot that is still read or written.
    def start(self, job: CopyJob) -> None:
        job.parts.append(job.make_parts)
        self._queue(job, partial(self._plan, job))

    def _plan(self, job: CopyJob) -> None:
        self._do_next(job)
        job.num_threads = max(1, min(self._num_threads, len(job.parts)))
        for _ in range(job.num_threads - 1):
            self._queue(job, partial(self._turn, job))
        self._turn(job)

    def _queue(self, job: CopyJob, task: Callable[[], None]) -> None:
        is_added = False
        try:
            with self._lock:
                self._waiting.add(job.turn, task)
                is_added = True
            self._threads.submit(self._run_next)
        except Exception as error:
            if is_added and not self._unqueue(job, task):
                return  # another thread has taken it
            job.stop(self._to_error(error))
            self._release(job)

    def _unqueue(self, job: CopyJob, task: Callable[[], None]) -> bool:
        with self._lock:
            try:
                self._waiting.discard(job.turn, task)
            except KeyError:
                return False
        return True

    def _run_next(self) -> None:
        with self._lock:
            taken = self._waiting.take()
        if taken is not None:  # there is a call for each waiting task
            _, task = taken
            task()

    def _turn(self, job: CopyJob) -> None:
        if self._do_next(job):
            self._queue(job, partial(self._turn, job))
        else:
            self._release(job)

    def _do_next(self, job: CopyJob) -> bool:
        try:
            part = job.parts.popleft()
        except IndexError:  # another thread may have taken the last one
            return False
        if job.error is not None:
            return False
        began = self._clock()
        try:
            job.moved.append((part(), self._clock() - began))
        except Exception as error:
            job.stop(self._to_error(error))
        return job.error is None and bool(job.parts)

    def _release(self, job: CopyJob) -> None:
        with self._lock:
            job.num_threads -= 1
            has_ended = not job.num_threads
        if has_ended:
            job.parts.clear()  # parts that were not started hold memory
            job.on_end(job)
