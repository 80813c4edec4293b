"""The threads that copy memory of local engines, slots, and memory mapped here, in fair turns."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

from kvbus.agent.engine import LocalEngine, engine_lost
from kvbus.agent.loop import failure, started_threads, until
from kvbus.agent.segments import RankMemory
from kvbus.errors import KVBusError
from kvbus.geometry import GroupSpec
from kvbus.memory.copying import PagedMemory
from kvbus.table import FairQueue, Key

LEAST_JOB_BYTES = 1 << 20
"""Takes longer than the way to another thread."""

Job = Callable[[], None]
OnEnd = Callable[[KVBusError | None], None]


@dataclass(slots=True, eq=False)
class Work:
    """Jobs that are done for one purpose; ``error`` is why it was stopped, or failed."""

    turn: Key
    on_end: OnEnd
    engine: LocalEngine | None
    jobs: deque[Job] = field(default_factory=deque)
    num_threads: int = 1
    error: KVBusError | None = None

    def stop(self, error: KVBusError) -> None:
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
            self.stop(failure(error))
        return self.error is None and bool(self.jobs)


# The queue of the threads holds each work as often as threads may serve it, and never a job. A
# thread takes a work, does one job of it, and puts it to the end of those with its key:
#
#     queue   [large] [small] [large]    small waits for one job of each owner before it,
#                │                       however many more these have
#                └─ one job ─▶ to the end, or out when nothing is left
#
# What each thread does next it finds by itself: the event loop hears of the end alone.
class Copiers:
    """At most ``num_threads`` jobs at once, in the turns of `kvbus.table.FairQueue`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        num_threads: int,
        new_executor: Callable[[int, str], Executor] = started_threads,
    ) -> None:
        self._loop, self._num_threads = loop, num_threads
        self._threads = new_executor(num_threads, "kvbus-copy")
        self._lock = Lock()
        self._waiting: FairQueue[Callable[[], None]] = FairQueue()
        self._running: defaultdict[LocalEngine | None, set[Work]] = defaultdict(set)

    @property
    def num_running(self) -> int:
        return sum(map(len, self._running.values()))

    def job_bytes(self, num_bytes: int, *, most: int) -> int:
        """The size of the jobs of a copy, of which each thread gets one; at ``most`` so many."""
        return min(most, max(LEAST_JOB_BYTES, -(-num_bytes // self._num_threads)))

    def start(
        self,
        turn: Key,
        plan: Callable[[], Iterable[Callable[[PagedMemory], None]]],
        on_end: OnEnd,
        *,
        engine: LocalEngine,
        memories: Collection[RankMemory],
        group: GroupSpec,
        at_once: bool = False,
    ) -> Work | None:
        """As `start_jobs`, with each copy of ``plan`` called once for each of ``memories``."""

        def copy_of(copy: Callable[[PagedMemory], None], memory: RankMemory) -> None:
            paged = memory.paged(group)
            if memory.stream is None:
                copy(paged)
            else:
                memory.stream.run(lambda: copy(paged), gone=lambda: engine.lost)

        def jobs() -> Iterable[Job]:
            return [partial(copy_of, copy, memory) for copy in plan() for memory in memories]

        return self.start_jobs(turn, jobs, on_end, engine=engine, at_once=at_once)

    # A job cannot be stopped, and a thread that copies holds addresses. So who asked hears of the
    # end of its copy and of nothing before: else its slot would be given on while it is still read
    # or written. Before each job the engine's end is looked at, as nothing may be copied for an
    # engine that is lost; for the copies that run then, `quiesce` waits.
    def start_jobs(
        self,
        turn: Key,
        plan: Callable[[], Iterable[Job]],
        on_end: OnEnd,
        *,
        engine: LocalEngine | None = None,
        at_once: bool = False,
    ) -> Work | None:
        """Have the jobs of ``plan``, which touch no memory but that of ``engine``, done in threads.

        ``plan`` is called there as well. ``on_end`` is called in the event loop, once, when none of
        them runs any more, with why they failed. With ``at_once`` all is done by this call: for
        what takes no longer than the way to a thread. Nothing is returned, and all has ended, then
        and for an engine that is lost.
        """
        if engine is not None and engine.lost:
            on_end(engine_lost())
            return None
        if at_once:
            on_end(_done_at_once(plan))
            return None
        work = Work(turn, on_end, engine)
        work.jobs.append(lambda: work.jobs.extend(plan()))
        self._running[engine].add(work)
        self._queue(work, partial(self._plan, work))
        return work

    async def quiesce(self, engine: LocalEngine) -> None:
        """Return when nothing copies from or to the memory of a lost engine, or refers to it."""
        await until(lambda: engine not in self._running)
        for rank in engine.ranks.values():
            rank.forget_paged()

    def forget(self, engine: LocalEngine) -> None:
        """The engine is lost: begin no job."""
        for work in self._running.get(engine, ()):
            work.stop(engine_lost())

    def _plan(self, work: Work) -> None:
        """No other thread serves the work yet; then as many do as it has jobs for, this one too."""
        work.do_next()
        work.num_threads = max(1, min(self._num_threads, len(work.jobs)))
        for _ in range(work.num_threads - 1):
            self._queue(work, partial(self._turn, work))
        self._turn(work)

    def _queue(self, work: Work, turn: Callable[[], None]) -> None:
        """A thread for each turn, but not each for its own. A turn that gets none has ended."""
        is_added = False
        try:
            with self._lock:
                self._waiting.add(work.turn, turn)
                is_added = True
            self._threads.submit(self._take_turn)
        except Exception as error:
            if is_added and not self._withdraw(work, turn):
                return  # another thread has taken it
            work.stop(failure(error))
            self._loop.call_soon_threadsafe(self._leave, work)

    def _withdraw(self, work: Work, turn: Callable[[], None]) -> bool:
        """Whether the turn still waited; it does not any more."""
        with self._lock:
            try:
                self._waiting.discard(work.turn, turn)
            except KeyError:
                return False
        return True

    def _take_turn(self) -> None:
        with self._lock:
            taken = self._waiting.take()
        if taken is not None:  # there is a call for each that waits
            _, turn = taken
            turn()

    def _turn(self, work: Work) -> None:
        if work.do_next():
            self._queue(work, partial(self._turn, work))
        else:
            self._loop.call_soon_threadsafe(self._leave, work)

    def _leave(self, work: Work) -> None:
        """In the event loop: one thread less serves the work."""
        work.num_threads -= 1
        if work.num_threads:
            return
        work.jobs.clear()  # what was not begun holds memory
        running = self._running[work.engine]
        running.discard(work)
        if not running:
            del self._running[work.engine]
        work.on_end(work.error)


def _done_at_once(plan: Callable[[], Iterable[Job]]) -> KVBusError | None:
    try:
        for job in plan():
            job()
    except Exception as error:
        return failure(error)
    return None
