"""Owns the waiting for free blocks: a request that finds the cache full gets its blocks later.

Refuses to overtake: the first request that waits is the first that gets blocks.
"""

from collections.abc import Iterable, Mapping
from random import Random

import anyio

from kvbus.demo.block_allocator import BlockAllocator
from kvbus.demo.paged_cache import Tables
from kvbus.geometry import BlockTable


class BlockPool:
    """The blocks of one group; ids come in no order, so that those of each pool are others."""

    def __init__(self, num_blocks: int, *, seed: str) -> None:
        self.num_blocks = num_blocks
        self._allocator = BlockAllocator(num_blocks)
        shuffled = self._allocator.allocate(num_blocks)
        Random(seed).shuffle(shuffled)  # noqa: S311 - any order will do
        self._allocator.free(shuffled)
        self._turn = anyio.Lock()
        self._returned = anyio.Event()

    @property
    def num_held(self) -> int:
        """Blocks that are not free."""
        return self.num_blocks - self._allocator.num_free

    async def take(self, num_blocks: int) -> list[int]:
        """Blocks for one request; waits for other requests to give theirs back."""
        async with self._turn:
            while self._allocator.num_free < min(num_blocks, self.num_blocks):
                await self._return()
            return self._allocator.allocate(num_blocks)

    def give(self, block_ids: Iterable[int]) -> None:
        """These blocks are free again."""
        self._allocator.free(block_ids)
        self._returned.set()

    async def all_free(self) -> None:
        """Return when no request holds a block."""
        while self.num_held:
            await self._return()

    async def _return(self) -> None:
        if self._returned.is_set():
            self._returned = anyio.Event()
        await self._returned.wait()


class BlockPools:
    """A pool for each group of an engine's cache.

    Every request takes from them in the same order, so that no two wait for each other.
    """

    def __init__(self, num_blocks: Mapping[str, int], *, seed: str) -> None:
        self._pools = {
            group: BlockPool(number, seed=f"{seed}/{group}") for group, number in num_blocks.items()
        }

    @property
    def num_held(self) -> int:
        """Blocks that are not free, of all groups."""
        return sum(pool.num_held for pool in self._pools.values())

    async def take(self, wanted: Mapping[str, range]) -> Tables:
        """A table for each group, of the blocks that are ``wanted`` by their position."""
        return {
            group: BlockTable.of(
                await pool.take(len(wanted[group])), first_block=wanted[group].start
            )
            for group, pool in self._pools.items()
        }

    def give(self, tables: Tables) -> None:
        """These blocks are free again."""
        for group, table in tables.items():
            self._pools[group].give(table.array().tolist())

    async def all_free(self) -> None:
        """Return when no request holds a block."""
        for pool in self._pools.values():
            await pool.all_free()
