"""Owns the threads that copy between the memory of local engines and staging slots.

Nothing is copied for an engine that is lost. What runs when that happens goes on: the addresses
must stay until `quiesce` returns.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import anyio

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.engines.rank_memory import RankMemory
from kvbus.errors import ErrorCode, LocalError
from kvbus.geometry import GroupSpec

if TYPE_CHECKING:
    from kvbus.memory.paged import PagedMemory

T = TypeVar("T")


class Copiers:
    """At most ``num_threads`` copies at once, each given the tensors of one group on one rank.

    These are made once, in a thread, and kept until the engine is forgotten. A copy that waits for
    a thread starts as soon as another ends, without the event loop's doing.
    """

    def __init__(self, *, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(
            num_threads, thread_name_prefix="kvbus-copy", initializer=_import_torch
        )
        self._ready: Future[None] | None = None
        self._paged: dict[tuple[RankMemory, str], PagedMemory] = {}
        self._running: dict[LocalEngine, set[anyio.Event]] = defaultdict(set)

    @property
    def ready(self) -> bool:
        """Whether a copy starts at once, as torch is imported."""
        return self._ready is not None and self._ready.done()

    def prepare(self) -> Future[None]:
        """Have torch imported in a thread, once; done when it is."""
        if self._ready is None:
            self._ready = self._threads.submit(_nothing)
        return self._ready

    # A copy cannot be stopped, and a thread that copies holds addresses. So whoever waits for it is
    # shielded: a cancelled request returns only after its copy, or its slot would be given to
    # another while this one is still written or read. The engine's end is looked at twice. Before,
    # as nothing may be copied for an engine that is lost; and after, as tensors that are kept would
    # hold on to its memory. In between `quiesce` waits, by the events of the copies that run.
    async def run(
        self,
        copy: Callable[[PagedMemory], T],
        *,
        engine: LocalEngine,
        memory: RankMemory,
        group: GroupSpec,
    ) -> T:
        """What ``copy`` returns, in a thread; cancelling waits for its end.

        Raises `LocalError` (``engine_lost``), and what ``copy`` raises.
        """
        if engine.lost:
            raise LocalError("a process of the engine ended", code=ErrorCode.ENGINE_LOST)
        key = memory, group.name
        known, stream = self._paged.get(key), memory.stream

        def in_thread() -> tuple[PagedMemory, T]:
            paged = known or _paged_memory(memory, group)
            if stream is None:
                return paged, copy(paged)
            return paged, stream.run(lambda: copy(paged), gone=lambda: engine.lost)

        ended = anyio.Event()
        self._running[engine].add(ended)
        try:
            with anyio.CancelScope(shield=True):
                paged, result = await asyncio.wrap_future(self._threads.submit(in_thread))
        finally:
            ended.set()
            self._running[engine].discard(ended)
            if not self._running[engine]:
                del self._running[engine]
        if not engine.lost:
            self._paged[key] = paged
        return result

    async def quiesce(self, engine: LocalEngine) -> None:
        """Return when nothing copies from or to the engine's memory any more."""
        for ended in list(self._running.get(engine, ())):
            await ended.wait()

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


def _paged_memory(memory: RankMemory, group: GroupSpec) -> PagedMemory:
    from kvbus.memory.paged import PagedMemory  # noqa: PLC0415  # imports torch: seconds
    from kvbus.memory.views import mapping_tensor  # noqa: PLC0415

    buffers = {name: mapping_tensor(mapping) for name, mapping in memory.mappings.items()}
    return PagedMemory(group, memory.rank.regions, buffers)
