"""Owns the threads that copy between the memory of local engines, slots, and memory mapped here.

Nothing is copied for an engine that is lost. What runs when that happens goes on: the addresses
must stay until `quiesce` returns.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import structlog

from kvbus.agent.engines.local_engine import LocalEngine, engine_lost
from kvbus.agent.engines.rank_memory import RankMemory
from kvbus.agent.staging.turns import FairThreads, Job, Work
from kvbus.errors import KVBusError
from kvbus.geometry import GroupSpec
from kvbus.memory.libc import load_library

if TYPE_CHECKING:
    from kvbus.memory.paged import PagedMemory

log = structlog.get_logger()

OnEnd = Callable[[KVBusError | None], None]

LARGEST_LIBRARY = "libtorch_cpu.so"


class Copiers:
    """At most ``num_threads`` copies at once; those of many jobs and those of one take fair turns.

    Copies with tensors get those of one group on each rank. These are made once, in a thread, and
    kept until the engine is forgotten. A copy that waits for a thread starts as soon as
    another ends, without the event loop's doing.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        num_threads: int,
        new_executor: Callable[[int, str], Executor] = ThreadPoolExecutor,
    ) -> None:
        self._threads = FairThreads(loop, num_threads=num_threads, new_executor=new_executor)
        self._new_executor = new_executor
        self._ready: Future[None] | None = None
        self._paged: dict[tuple[RankMemory, str], PagedMemory] = {}
        self._running: defaultdict[LocalEngine, set[Work]] = defaultdict(set)
        self._idle: dict[LocalEngine, anyio.Event] = {}

    @property
    def ready(self) -> bool:
        """Whether a copy with tensors starts at once, as torch is imported."""
        return self._ready is not None and self._ready.done()

    @property
    def num_running(self) -> int:
        """Copies of engines' memory that have not ended."""
        return sum(map(len, self._running.values()))

    def prepare_for(self, engine: LocalEngine) -> None:
        """Begin with `prepare` for an engine of which all KV passes through slots."""
        if not all(rank.direct for rank in engine.ranks.values()):
            self.prepare()

    def prepare(self) -> Future[None]:
        """Have torch imported in a thread of its own, once; done when it is."""
        if self._ready is None:
            thread = self._new_executor(1, "kvbus-import")
            self._ready = thread.submit(_import_torch)
            thread.shutdown(wait=False)
        return self._ready

    # A job cannot be stopped, and a thread that copies holds addresses. So who asked hears of the
    # end of its copy and of nothing before: else its slot would be given on while it is still read
    # or written. The engine's end is looked at twice. Before each job, as nothing may be copied for
    # an engine that is lost; and after, as tensors that are kept would hold on to its memory. In
    # between `quiesce` waits, for the copies that run.
    def start(
        self,
        copy: Callable[[PagedMemory], None],
        on_end: OnEnd,
        *,
        engine: LocalEngine,
        memories: Collection[RankMemory],
        group: GroupSpec,
        priority: int = 0,
    ) -> Work | None:
        """Have ``copy`` called in threads, once for each of ``memories``.

        ``on_end`` gets why it failed, or None, when nothing of it runs. That is called in the event
        loop, once; at once, and nothing is returned, for an engine that is lost.
        """
        imported = self.prepare()
        known = {one: paged for one in memories if (paged := self._paged.get((one, group.name)))}

        def in_thread(memory: RankMemory) -> None:
            imported.result()
            paged = known[memory] = known.get(memory) or _paged_memory(memory, group)
            if memory.stream is None:
                copy(paged)
            else:
                memory.stream.run(lambda: copy(paged), gone=lambda: engine.lost)

        def end(error: KVBusError | None) -> None:
            if error is None and not engine.lost:
                self._paged |= {(memory, group.name): paged for memory, paged in known.items()}
            on_end(error)

        jobs = [partial(in_thread, memory) for memory in memories]
        start = partial(self._threads.start, jobs, priority=priority)
        return self._start(engine, end, start)

    def start_jobs(
        self,
        plan: Callable[[], Iterable[Job]],
        on_end: OnEnd,
        *,
        engine: LocalEngine,
        at_once: bool = False,
        priority: int = 0,
    ) -> Work | None:
        """Have the jobs of ``plan`` done in threads, and ``plan`` called there; else as `start`.

        With ``at_once`` all is done by this call, in the event loop: for what takes no longer than
        the way to a thread.
        """
        if at_once and not engine.lost:
            on_end(_done_at_once(plan))
            return None
        start = partial(self._threads.start_planned, plan, priority=priority)
        return self._start(engine, on_end, start)

    def start_alone(self, job: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Have ``job``, which touches no engine's memory, called in a thread, then ``on_end``.

        That is called in the event loop, once; a job that fails is logged.
        """

        def end(error: Exception | None) -> None:
            if error is not None:
                _failure(error)
            on_end()

        self._threads.start([job], end)

    def _start(
        self,
        engine: LocalEngine,
        on_end: OnEnd,
        begin: Callable[[Callable[[Exception | None], None]], Work],
    ) -> Work | None:
        if engine.lost:
            on_end(engine_lost())
            return None

        def end(error: Exception | None) -> None:
            running = self._running[engine]
            running.discard(work)
            if not running:
                del self._running[engine]
                self._idle.pop(engine, anyio.Event()).set()
            on_end(None if error is None else _failure(error))

        work = begin(end)
        self._running[engine].add(work)
        return work

    async def quiesce(self, engine: LocalEngine) -> None:
        """Return when nothing copies from or to the engine's memory any more."""
        if engine in self._running:
            await self._idle.setdefault(engine, anyio.Event()).wait()

    def forget(self, engine: LocalEngine) -> None:
        """The engine is lost: begin no job, and keep no tensors of its memory."""
        for work in self._running.get(engine, ()):
            work.stop(engine_lost())
        lost = set(engine.ranks.values())
        self._paged = {key: paged for key, paged in self._paged.items() if key[0] not in lost}


# Torch is imported for the first copy with tensors, or once an engine is there that needs such
# copies, not at the agent's start: most agents make none, as their engines have equal shapes, and
# it takes 1 to 2 s and 190 MB. An import holds the interpreter while it loads a library: a third of
# a second for the largest one, on a quiet machine. So that one is loaded before, without: the event
# loop stops for some 0.08 s then. Whatever counts seconds of a lease must not start before `ready`.
# It has a thread of its own: copies without torch go on meanwhile.
def _import_torch() -> None:
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        load_library(str(Path(torch.origin).parent / "lib" / LARGEST_LIBRARY))
    from kvbus.memory.copying import copy_on_one_thread  # noqa: PLC0415  # imports torch

    copy_on_one_thread()


def _done_at_once(plan: Callable[[], Iterable[Job]]) -> KVBusError | None:
    try:
        for job in plan():
            job()
    except Exception as error:
        return _failure(error)
    return None


def _failure(error: Exception) -> KVBusError:
    """What nobody foresaw is logged with its trace, and fails this copy alone."""
    if isinstance(error, KVBusError):
        return error
    log.error("step.failed", exc_info=error)
    return KVBusError(f"failed inside: {type(error).__name__}; the agent's log says more")


def _paged_memory(memory: RankMemory, group: GroupSpec) -> PagedMemory:
    from kvbus.memory.paged import PagedMemory  # noqa: PLC0415  # imports torch: seconds

    buffers = {name: mapping.tensor for name, mapping in memory.mappings.items()}
    return PagedMemory(group, memory.rank.regions, buffers)
