"""Owns the threads that copy between the memory of local engines and staging slots.

Nothing is copied for an engine that is lost. What runs when that happens goes on: the addresses
must stay until `quiesce` returns.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import anyio
import structlog

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.engines.rank_memory import RankMemory
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.geometry import GroupSpec

if TYPE_CHECKING:
    from kvbus.memory.paged import PagedMemory

log = structlog.get_logger()


class Copiers:
    """At most ``num_threads`` copies at once, each given the tensors of one group on one rank.

    These are made once, in a thread, and kept until the engine is forgotten. A copy that waits for
    a thread starts as soon as another ends, without the event loop's doing.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, num_threads: int) -> None:
        self._loop = loop
        self._threads = ThreadPoolExecutor(
            num_threads, thread_name_prefix="kvbus-copy", initializer=_import_torch
        )
        self._ready: Future[None] | None = None
        self._paged: dict[tuple[RankMemory, str], PagedMemory] = {}
        self._num_running: defaultdict[LocalEngine, int] = defaultdict(int)
        self._idle: dict[LocalEngine, anyio.Event] = {}

    @property
    def ready(self) -> bool:
        """Whether a copy starts at once, as torch is imported."""
        return self._ready is not None and self._ready.done()

    def prepare(self) -> Future[None]:
        """Have torch imported in a thread, once; done when it is."""
        if self._ready is None:
            self._ready = self._threads.submit(lambda: None)
        return self._ready

    # A copy cannot be stopped, and a thread that copies holds addresses. So who asked hears of its
    # end and of nothing before: else its slot would be given on while it is still read or written.
    # The engine's end is looked at twice. Before, as nothing may be copied for an engine that is
    # lost; and after, as tensors that are kept would hold on to its memory. In between `quiesce`
    # waits, by the number of copies that run.
    def start(
        self,
        copy: Callable[[PagedMemory], None],
        on_end: Callable[[KVBusError | None], None],
        *,
        engine: LocalEngine,
        memory: RankMemory,
        group: GroupSpec,
    ) -> None:
        """Have ``copy`` called in a thread; ``on_end`` gets why it failed, or None.

        That is called in the event loop, once; at once for an engine that is lost.
        """
        if engine.lost:
            on_end(LocalError("a process of the engine ended", code=ErrorCode.ENGINE_LOST))
            return
        known = self._paged.get((memory, group.name))

        def in_thread() -> PagedMemory:
            paged = known or _paged_memory(memory, group)
            if memory.stream is None:
                copy(paged)
            else:
                memory.stream.run(lambda: copy(paged), gone=lambda: engine.lost)
            return paged

        def end(future: asyncio.Future[PagedMemory]) -> None:
            self._num_running[engine] -= 1
            if not self._num_running[engine]:
                del self._num_running[engine]
                self._idle.pop(engine, anyio.Event()).set()
            try:
                paged = future.result()
            except Exception as error:
                on_end(_failure(error))
                return
            if not engine.lost:
                self._paged[memory, group.name] = paged
            on_end(None)

        self._num_running[engine] += 1
        self._loop.run_in_executor(self._threads, in_thread).add_done_callback(end)

    def start_alone(self, job: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Have ``job``, which touches no engine's memory, called in a thread, then ``on_end``.

        That is called in the event loop, once; a job that fails is logged.
        """

        def end(future: asyncio.Future[None]) -> None:
            try:
                future.result()
            except Exception as error:
                _failure(error)
            on_end()

        self._loop.run_in_executor(self._threads, job).add_done_callback(end)

    async def quiesce(self, engine: LocalEngine) -> None:
        """Return when nothing copies from or to the engine's memory any more."""
        if engine in self._num_running:
            await self._idle.setdefault(engine, anyio.Event()).wait()

    def forget(self, engine: LocalEngine) -> None:
        """The engine is lost: keep no tensors of its memory."""
        lost = set(engine.ranks.values())
        self._paged = {key: paged for key, paged in self._paged.items() if key[0] not in lost}


# The first thread that copies imports torch, not the agent at its start: most agents never copy, as
# their engines have equal shapes, and torch takes 1 to 2 s and 190 MB. Its import stops the event
# loop for as long as its largest library takes to load (a third of a second on a quiet machine).
# So whatever counts seconds of a lease must not start before `ready`.
def _import_torch() -> None:
    from kvbus.memory.copying import copy_on_one_thread  # noqa: PLC0415  # imports torch

    copy_on_one_thread()


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
