"""The memory of an engine of a chaos run: one kept session for each rank, and its blocks.

It stays while sessions come and go. That of an engine with a ring is private; its ring stays, too.
"""

from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path

from kvbus.demo.device import device_copy
from kvbus.engine import KeptSession, KvCache, MemorySession
from kvbus.engine.bounce import HostBuffer, HostPool, LocalCopier
from tests.chaos.pattern import View, views_of
from tests.chaos.pool import Pool, Report
from tests.chaos.shapes import RING_PART, Shape
from tests.host_engines import private_cache
from tests.memories import Memory


class EngineMemory:
    """``views`` and ``pool`` are of the engine's own blocks; ``shared`` is what the agent maps."""

    views: list[View]
    pool: Pool
    shared: list[KvCache]
    ring: tuple[HostPool, LocalCopier] | None = None

    def __init__(self, shape: Shape, attach: Path, report: Report, seed: int) -> None:
        self.shape, self.spec = shape, shape.spec
        self._attach, self._report, self._seed = attach, report, seed
        self._caches: dict[int, KvCache] = {}
        self._buffers: dict[int, HostBuffer] = {}

    async def open(self, stack: AsyncExitStack) -> None:
        """Return when each rank is registered for the first time; they end with ``stack``."""
        storages = stack.enter_context(ExitStack())
        for rank in range(self.spec.num_ranks):
            session = partial(MemorySession, self._attach, self.spec, rank, storages=storages)
            kept = KeptSession(session, begin=self._allocate, name=f"rank {rank}")
            await (await stack.enter_async_context(kept)).opened()
        buffers = [self._buffers[rank] for rank in sorted(self._buffers)]
        if buffers:
            self._open_ring(buffers)
        else:
            self.shared = [self._caches[rank] for rank in sorted(self._caches)]
            self._use(self.shared)

    async def _allocate(self, session: MemorySession) -> None:
        """Once: the later sessions register what this one had."""
        if self.shape.memory == "ring":
            blocks = self.shape.num_blocks(RING_PART)
            self._buffers[session.rank] = await session.allocate_ring(blocks)
            return
        self._caches[session.rank] = await session.allocate(
            self.shape.kv_layout,
            num_blocks=self.shape.num_blocks(),
            direct=self.shape.memory == "direct",
        )

    def _open_ring(self, buffers: list[HostBuffer]) -> None:
        plain = Memory(self.shape.kv_layout)
        ranks, num_blocks = range(self.spec.num_ranks), self.shape.num_blocks()
        caches = [private_cache(self.spec, rank, plain, num_blocks) for rank in ranks]
        self.ring = (
            HostPool(self.shape.num_blocks(RING_PART)),
            LocalCopier(buffers, device_copy(caches)),
        )
        self.shared = [KvCache(self.spec, one.rank, one.tensor) for one in buffers]
        self._use(caches)

    def _use(self, caches: list[KvCache]) -> None:
        self.views = views_of(self.spec, caches)
        self.pool = Pool(self.views, self.shape.num_blocks(), self._report, self._seed)
