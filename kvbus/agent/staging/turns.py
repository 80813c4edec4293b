"""Owns threads that do the jobs of many works in fair turns.

Refuses to stop a job that has begun: a work that is stopped ends when none of its jobs runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

from kvbus.table import Turns, UrgentFirst

Job = Callable[[], None]


@dataclass(slots=True, eq=False)
class Work:
    """Jobs that are done for one purpose; ``error`` is why it was stopped, or failed."""

    on_end: Callable[[Exception | None], None]
    jobs: deque[Job] = field(default_factory=deque)
    priority: int = 0
    num_threads: int = 1
    error: Exception | None = None

    def stop(self, error: Exception) -> None:
        """Begin no further job; its end follows when none runs."""
        self.error = self.error or error

    def do_next(self) -> bool:
        """Do one job; returns whether there may be another."""
        try:
            job = self.jobs.popleft()
        except IndexError:  # another thread may have taken the last one
            return False
        if self.error is not None:
            return False
        try:
            job()
        except Exception as error:
            self.stop(error)
        return self.error is None and bool(self.jobs)


# The queue of the threads holds each work as often as threads may serve it, and never a job. A
# thread takes a work, does one job of it, and puts it to the end of the queue:
#
#     queue   [large] [small] [large]    small waits for one job of each work before it,
#                │                       however many more these have
#                └─ one job ─▶ to the end, or out when nothing is left
#
# A more urgent work is taken first, but not in each turn, so none waits for ever. What each thread
# does next it finds by itself: the event loop hears of the end alone.
class FairThreads:
    """At most ``num_threads`` jobs at once; a work that comes waits for one job of each other.

    Of those with a greater ``priority`` it may wait for more, see `kvbus.table.urgent_first`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        num_threads: int,
        new_executor: Callable[[int, str], Executor] = ThreadPoolExecutor,
    ) -> None:
        self._loop, self._num_threads = loop, num_threads
        self._threads = new_executor(num_threads, "kvbus-copy")
        self._lock = Lock()
        self._waiting: UrgentFirst[Callable[[], None]] = UrgentFirst()
        self._turns = Turns()

    def start(
        self,
        jobs: Iterable[Job],
        on_end: Callable[[Exception | None], None],
        *,
        priority: int = 0,
    ) -> Work:
        """Have the jobs done; ``on_end`` is called in the event loop, once, with why they failed.

        That is when none of them runs any more.
        """
        work = Work(on_end, deque(jobs), priority)
        self._serve(work)
        return work

    def start_planned(
        self,
        plan: Callable[[], Iterable[Job]],
        on_end: Callable[[Exception | None], None],
        *,
        priority: int = 0,
    ) -> Work:
        """Have the jobs of ``plan`` done, which is called in a thread itself; else as `start`."""
        work = Work(on_end, priority=priority)
        self._queue(work, partial(self._plan, work, plan))
        return work

    def _plan(self, work: Work, plan: Callable[[], Iterable[Job]]) -> None:
        """No other thread serves the work yet."""
        work.jobs.append(lambda: work.jobs.extend(plan()))
        work.do_next()
        self._serve(work)

    def _serve(self, work: Work) -> None:
        """By as many threads as it has jobs for."""
        work.num_threads = max(1, min(self._num_threads, len(work.jobs)))
        for _ in range(work.num_threads):
            self._queue(work, partial(self._turn, work))

    def _queue(self, work: Work, turn: Callable[[], None]) -> None:
        """A thread for each turn, but not each for its own."""
        with self._lock:
            self._waiting.add(turn, work.priority)
        self._threads.submit(self._take_turn)

    def _take_turn(self) -> None:
        with self._lock:
            turn = self._waiting.take(fair=self._turns.next_is_fair())
        turn()

    def _turn(self, work: Work) -> None:
        if work.do_next():
            self._queue(work, partial(self._turn, work))
        else:
            self._loop.call_soon_threadsafe(self._leave, work)

    def _leave(self, work: Work) -> None:
        """In the event loop: one thread less serves the work."""
        work.num_threads -= 1
        if not work.num_threads:
            work.jobs.clear()  # what was not begun holds memory
            work.on_end(work.error)
