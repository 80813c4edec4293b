"""The blocks of an engine's cache: which ones a request gets, and which ones it needs."""

from collections.abc import Mapping

import numpy as np

from kvbus.engine.bounce import HostPool
from kvbus.geometry import BlockTable, GroupSpec, num_blocks_for

Tables = Mapping[str, BlockTable]
"""The blocks of one request, by group; a table may lack those that a window has left behind."""


class ShuffledPool(HostPool):
    """The blocks of a cache by group; a request's are in no order, another one for each seed."""

    def __init__(self, num_blocks: Mapping[str, int], *, seed: str) -> None:
        super().__init__(num_blocks)
        self._rng = np.random.default_rng(list(seed.encode()))

    async def take(self, wanted: Mapping[str, range], *, wait_s: float) -> Tables:
        """A table for each group, of the blocks that are ``wanted`` by their position.

        Waits for other requests to give theirs back; raises the errors of `acquire`.
        """
        numbers = {group: len(blocks) for group, blocks in wanted.items()}
        taken = await self.acquire(numbers, wait_s=wait_s)
        return {
            group: BlockTable.of(self._rng.permutation(ids), first_block=wanted[group].start)
            for group, ids in taken.items()
        }

    def give(self, tables: Tables) -> None:
        """These blocks are free again; raises `LocalError` when one of them is already."""
        self.release({group: table.array() for group, table in tables.items()})


def prefill_blocks(group: GroupSpec, num_tokens: int) -> range:
    """By position, the blocks of a prompt."""
    return range(num_blocks_for(num_tokens, group.block_size))


def decode_blocks(group: GroupSpec, num_tokens: int, num_new: int) -> range:
    """By position, the blocks of what is read of a prompt, and of the new tokens after it.

    The decode side has no blocks for what a sliding window has left behind.
    """
    first, _ = group.positions(0, num_tokens)
    size = group.block_size
    return range(first // size, num_blocks_for(num_tokens + num_new, size))
