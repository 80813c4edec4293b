"""The memory of an engine of a chaos run: kept, unless something may still write there.

The cache of an engine with a ring is private, and always kept; its ring is new in each session.
"""

from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from kvbus.demo.device import device_copy
from kvbus.engine import KvCache, MemorySession
from kvbus.engine.bounce import HostPool, LocalCopier
from tests.chaos.pattern import View, views_of
from tests.chaos.pool import Pool, Report
from tests.chaos.shapes import RING_PART, Shape
from tests.host_engines import private_cache
from tests.memories import Memory


class EngineMemory:
    """``views`` and ``pool`` are of the engine's own blocks; set ``in_doubt`` to get new memory."""

    views: list[View]
    pool: Pool

    def __init__(self, shape: Shape, attach: Path, report: Report, seed: int) -> None:
        self.shape, self.spec = shape, shape.spec
        self._attach, self._report, self._seed = attach, report, seed
        self.in_doubt = False
        self._sessions: list[MemorySession] = []
        self._caches: list[KvCache] = []
        self._before, self._storages = ExitStack(), ExitStack()
        self.ring: tuple[HostPool, LocalCopier] | None = None
        self.ring_caches: list[KvCache] = []
        if shape.memory == "ring":
            plain = Memory(shape.kv_layout)
            ranks, num_blocks = range(self.spec.num_ranks), shape.num_blocks()
            self._use([private_cache(self.spec, rank, plain, num_blocks) for rank in ranks])

    async def open(self, stack: AsyncExitStack) -> None:
        """Register memory in new sessions, which end with ``stack``."""
        is_new = self.in_doubt or not self._sessions or self.shape.memory == "ring"
        if is_new:  # what is older than the last ends now: of the last, copies may still end
            self._before.close()
            self._before, self._storages = self._storages, ExitStack()
        sessions = [
            await stack.enter_async_context(
                MemorySession(self._attach, self.spec, rank, storages=self._storages)
            )
            for rank in range(self.spec.num_ranks)
        ]
        if self.shape.memory == "ring":
            await self._open_ring(sessions)
        elif is_new:
            self._use([await self._allocate(session) for session in sessions])
            self.in_doubt = False
        else:
            for session, before in zip(sessions, self._sessions, strict=True):
                await session.resume(before)
        self._sessions = sessions

    async def _allocate(self, session: MemorySession) -> KvCache:
        return await session.allocate(
            self.shape.kv_layout,
            num_blocks=self.shape.num_blocks(),
            direct=self.shape.memory == "direct",
        )

    async def _open_ring(self, sessions: list[MemorySession]) -> None:
        blocks = self.shape.num_blocks(RING_PART)
        buffers = [await session.allocate_ring(blocks) for session in sessions]
        self.ring = HostPool(blocks), LocalCopier(buffers, device_copy(self._caches))
        self.ring_caches = [KvCache(self.spec, one.rank, one.tensor) for one in buffers]

    def _use(self, caches: list[KvCache]) -> None:
        self._caches, self.views = caches, views_of(self.spec, caches)
        self.pool = Pool(self.views, self.shape.num_blocks(), self._report, self._seed)

    @property
    def caches(self) -> list[KvCache]:
        """What the agent maps: the engine's cache, or its ring."""
        return self.ring_caches or self._caches
