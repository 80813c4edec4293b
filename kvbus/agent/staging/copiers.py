"""Owns the threads that copy between the memory of local engines and staging slots.

Nothing is copied for an engine that is lost. What runs when that happens goes on: the addresses
must stay until `quiesce` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import structlog

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.engines.rank_memory import RankMemory
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.geometry import GroupSpec

if TYPE_CHECKING:
    from kvbus.memory.paged import PagedMemory

log = structlog.get_logger()

T = TypeVar("T")


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
            self._ready = self._threads.submit(_nothing)
        return self._ready

    # A copy cannot be stopped, and a thread that copies holds addresses. So who asked hears of its
    # end and of nothing before: else its slot would be given on while it is still read or written.
    # The engine's end is looked at twice. Before, as nothing may be copied for an engine that is
    # lost; and after, as tensors that are kept would hold on to its memory. In between `quiesce`
    # waits, by the number of copies that run.
    def start(
        self,
        copy: Callable[[PagedMemory], T],
        on_end: Callable[[T | KVBusError], None],
        *,
        engine: LocalEngine,
        memory: RankMemory,
        group: GroupSpec,
    ) -> None:
        """Have ``copy`` called in a thread; ``on_end`` gets what it returns, or why it failed.

        That is called in the event loop, once; at once for an engine that is lost.
        """
        if engine.lost:
            on_end(LocalError("a process of the engine ended", code=ErrorCode.ENGINE_LOST))
            return
        known = self._paged.get((memory, group.name))

        def in_thread() -> tuple[PagedMemory, T]:
            paged = known or _paged_memory(memory, group)
            if memory.stream is None:
                return paged, copy(paged)
            return paged, memory.stream.run(lambda: copy(paged), gone=lambda: engine.lost)

        def end(future: Future[tuple[PagedMemory, T]]) -> None:
            self._num_running[engine] -= 1
            if not self._num_running[engine]:
                del self._num_running[engine]
                self._idle.pop(engine, anyio.Event()).set()
            try:
                paged, result = future.result()
            except Exception as error:
                on_end(_failure(error))
                return
            if not engine.lost:
                self._paged[memory, group.name] = paged
            on_end(result)

        self._num_running[engine] += 1
        self._threads.submit(in_thread).add_done_callback(partial(self._deliver, end))

    async def quiesce(self, engine: LocalEngine) -> None:
        """Return when nothing copies from or to the engine's memory any more."""
        if engine in self._num_running:
            await self._idle.setdefault(engine, anyio.Event()).wait()

    def _deliver(self, end: Callable[[Any], None], future: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(end, future)

    def forget(self, engine: LocalEngine) -> None:
        """The engine is lost: keep no tensors of its memory."""
        lost = set(engine.ranks.values())
        self._paged = {key: paged for key, paged in self._paged.items() if key[0] not in lost}


# The first thread that copies imports torch, not the agent at its start: most agents never copy, as
# their engines have equal shapes, and torch takes 1 to 2 s and 190 MB. Its import stops the event
# loop for as long as its largest library takes to load (a third of a second on a quiet machine).
# So whatever counts seconds of a lease must not start before `ready`.
def _import_torch() -> None:
    from kvbus.memory.threads import copy_on_one_thread  # noqa: PLC0415  # imports torch

    copy_on_one_thread()


def _nothing() -> None:
    """The work that makes the first thread start."""


def _failure(error: Exception) -> KVBusError:
    """What nobody foresaw is logged with its trace, and fails this copy alone."""
    if isinstance(error, KVBusError):
        return error
    log.error("step.failed", exc_info=error)
    return KVBusError(f"failed inside: {type(error).__name__}; the agent's log says more")


def _paged_memory(memory: RankMemory, group: GroupSpec) -> PagedMemory:
    from kvbus.memory.paged import PagedMemory  # noqa: PLC0415  # imports torch: seconds
    from kvbus.memory.views import mapping_tensor  # noqa: PLC0415

    buffers = {name: mapping_tensor(mapping) for name, mapping in memory.mappings.items()}
    return PagedMemory(group, memory.rank.regions, buffers)
