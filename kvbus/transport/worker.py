"""The transport's thread: it does NIXL's calls, in turn, and sleeps when there are none.

Short ones another thread may do itself, while this one does none.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from kvbus.errors import ClosedError, ErrorCode, LocalError
from kvbus.transport.scheduler import ReadJob, ReadScheduler
from kvbus.transport.types import TransportLimits

COPIED_S = 25e-6
"""A pass that took longer has copied: UCX does so within progress, and a pause would be idle."""

FIRST_ELSEWHERE, SLOW_ELSEWHERE = 1, 16

Result = TypeVar("Result")
Command = Callable[[], None]


class Worker:
    """One thread with an inbox of commands.

    It waits in the inbox, so that a command wakes it from any pause: without a limit while
    nothing needs progress, for `poll_s` while something does, not at all while slices move.
    What it drives is ``scheduler``, which a command sets, and takes away at the end.
    """

    def __init__(self, limits: TransportLimits, on_broken: Callable[[Exception], object]) -> None:
        self._limits, self._on_broken = limits, on_broken
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._lock = threading.Lock()
        self._in_nixl = threading.Lock()
        self._closed = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvbus-transport", daemon=True)
        self.scheduler: ReadScheduler | None = None
        self._moved_at = 0.0
        self._waiting: list[_Waiting] = []
        self.demands = self.passes = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, command: Command, *, urgent: bool = False) -> None:
        """Run a command on the thread; raises `ClosedError`, or `LocalError` (busy) when full.

        An urgent one is never refused for want of room: those are bounded by what they end.
        """
        with self._lock:
            self._check_open()
            if not urgent and self._inbox.qsize() >= self._limits.max_commands:
                raise LocalError("too many transport commands wait", code=ErrorCode.BUSY)
            self._inbox.put(command)

    def call(self, function: Callable[[], Result], *, urgent: bool = False) -> Future[Result]:
        """Run a function on the thread; its result, or its error, is the future's."""
        future: Future[Result] = Future()
        self.post(partial(_settle, future, function), urgent=urgent)
        return future

    def call_when(
        self, ready: Callable[[], bool], function: Callable[[], Result], *, within_s: float
    ) -> Future[Result]:
        """Run a function on the thread once ``ready`` says so, there as well, or time is up."""
        future: Future[Result] = Future()
        wait = _Waiting(ready, time.monotonic() + within_s, partial(_settle, future, function))
        self.post(partial(self._waiting.append, wait), urgent=True)
        return future

    def stop(self, function: Callable[[], Result], *, within_s: float) -> Future[Result]:
        """End the thread once no handle is outstanding, or time is up; ``function`` runs last."""
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # who waits for it no longer does not keep it alive

        def last() -> None:
            self._stopping = True
            _settle(future, function)

        wait = _Waiting(self._is_idle, time.monotonic() + within_s, last)
        with self._lock:
            self._check_open()
            self._closed = True
            self._inbox.put(partial(self._waiting.append, wait))
        return future

    def try_here(self, call: Callable[[ReadScheduler], None]) -> bool:
        """Have ``call`` use NIXL on the caller's thread; False when that would have to wait.

        Nothing else is in progress then. What it leaves in progress, the worker's thread goes on
        with.
        """
        if not self._in_nixl.acquire(blocking=False):
            return False
        try:
            scheduler = self.scheduler
            if self._closed or scheduler is None or scheduler.busy:
                return False
            call(scheduler)
            self._moved_at = time.perf_counter()
        except Exception as error:  # what was begun here never ends: as a defect of the thread
            self._inbox.put(partial(_raise, error))
            return True
        finally:
            self._in_nixl.release()
        if scheduler.busy:
            self._inbox.put(_nothing)  # wakes the thread
        return True

    def demand(self, change: int) -> None:
        """Count one more or one less who needs progress driven."""
        with self._lock:
            self.demands += change
            if not self._closed and self.demands == 1 and change > 0:
                self._inbox.put(_nothing)  # wakes the thread

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the transport is closed")

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                with self._in_nixl:
                    self._step()
                    self._run_waiting()
        except Exception as error:  # a defect: what was started never ends
            self._on_broken(error)
        finally:
            self._closed = True  # also when it breaks: later calls are refused, not lost
        if self.scheduler is not None:
            threading.Event().wait()  # for ever: a handle is live, and NIXL must not end under it

    def _take_commands(self) -> None:
        try:
            command = self._inbox.get(timeout=self._pause_s())
            while True:
                with self._in_nixl:
                    command()
                command = self._inbox.get_nowait()
        except Empty:
            return

    # How long to wait in the inbox. UCX moves nothing unless somebody drives it, NIXL's own thread
    # would burn a core for that, and who spins takes the core that the peer's copy needs:
    #
    #     nothing demanded, nothing posted     no limit: a command wakes the thread
    #     progress demanded (a lease of ours   poll_s: as a target we are driven by our own calls
    #       is live, we are being read)        only, an idle target never answers
    #     handles posted, one moved or was     0: the next one is about to end (for spin_s if few
    #       copied just now                    bytes are posted, else for short_spin_s)
    #     handles posted, quiet for a while    poll_s
    #
    # Demand is counted under the lock, and its first one puts a command into the inbox: a thread
    # that had decided to sleep without limit just before is woken by it.
    def _pause_s(self) -> float | None:
        limits, scheduler = self._limits, self.scheduler
        if scheduler and scheduler.busy:
            since = time.perf_counter() - self._moved_at
            few = scheduler.posted_bytes <= limits.spin_bytes
            spin_s = limits.spin_s if few else limits.short_spin_s
            return 0.0 if since < spin_s else limits.poll_s
        demanded = scheduler is not None and self.demands
        return limits.poll_s if demanded or self._waiting else None

    def _step(self) -> None:
        scheduler = self.scheduler
        if scheduler is None or not (self.demands or scheduler.busy):
            return
        self.passes += 1
        began = time.perf_counter()
        if self.demands or scheduler.num_handles:
            scheduler.agent.progress()
        moved, now = scheduler.step(), time.perf_counter()
        if moved or (now - began > COPIED_S and scheduler.busy):
            self._moved_at = now

    def _run_waiting(self) -> None:
        for wait in self._waiting[:]:
            if wait.ready() or time.monotonic() >= wait.until:
                self._waiting.remove(wait)
                wait.command()

    def _is_idle(self) -> bool:
        return self.scheduler is None or not self.scheduler.num_handles


# Two wake-ups of threads cost more than a short READ. So one is posted by who asks for it, the
# event loop of an agent, if the transport's thread does nothing then. That holds the loop for
#
#     the post, which may copy      here_bytes in here_descriptors: some 100 µs
#     looks at the handle           here_s; then the thread goes on with it
#
# and never for a connection: the first READ from each peer, which may connect to it, is the
# thread's. So are some after one that took longer, as it does over TCP.
class KnownPeers:
    """What is known of the peers of one NIXL agent: how READs from each end, and how soon."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._num_elsewhere: dict[str, int] = {}
        """How many READs from each peer are left to the thread before one is done here."""
        self.undriven: set[str] = set()
        """Those of which the last READ has ended in its posts."""

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

    def note_done(self, job: ReadJob) -> None:
        """It has ended well."""
        num_elsewhere = self._num_elsewhere.get(job.peer, FIRST_ELSEWHERE)
        self._num_elsewhere[job.peer] = max(0, num_elsewhere - 1)
        (self.undriven.add if job.at_once else self.undriven.discard)(job.peer)

    def forget(self, peer: str) -> None:
        """The next one may have to connect."""
        self._num_elsewhere.pop(peer, None)
        self.undriven.discard(peer)


class _Waiting(NamedTuple):
    """What the thread does once it is ready, or time is up."""

    ready: Callable[[], bool]
    until: float
    command: Command


def _settle(future: Future[Result], function: Callable[[], Result]) -> None:
    if not (future.running() or future.set_running_or_notify_cancel()):
        return
    try:
        result = function()
    except Exception as error:  # it belongs to who waits for the future
        future.set_exception(error)
    else:
        future.set_result(result)


def _raise(error: Exception) -> None:
    """The command that ends the thread by what was met elsewhere."""
    raise error


def _nothing() -> None:
    """The command that only wakes the thread."""
