"""The blocks of an engine's cache: who has them, who waits for them, which ones a request needs.

Refuses to hand a block to two owners, and to overtake: who waits first is first served.
"""

from collections.abc import Mapping
from random import Random

import anyio

from kvbus.errors import LocalError
from kvbus.geometry import BlockTable, GroupSpec, num_blocks_for

Tables = Mapping[str, BlockTable]
"""The blocks of one request, by group; a table may lack those that a window has left behind."""


class BlockPool:
    """The blocks of each group; their ids come in no order, another one for each seed.

    A request takes all its blocks at once, so that no two wait for each other. The block freed
    last is handed out first.
    """

    def __init__(self, num_blocks: Mapping[str, int], *, seed: str) -> None:
        self.num_blocks = dict(num_blocks)
        self._free = {group: list(range(number)) for group, number in num_blocks.items()}
        for group, ids in self._free.items():
            Random(f"{seed}/{group}").shuffle(ids)  # noqa: S311 - any order will do
        self._held: dict[str, set[int]] = {group: set() for group in num_blocks}
        self._turn = anyio.Lock()
        self._freed = anyio.Event()

    @property
    def num_held(self) -> int:
        """Blocks that are not free, of all groups."""
        return sum(map(len, self._held.values()))

    async def take(self, wanted: Mapping[str, range]) -> Tables:
        """A table for each group, of the blocks that are ``wanted`` by their position.

        Waits for other requests to give theirs back; raises `LocalError` where that cannot help.
        """
        for group, blocks in wanted.items():
            if len(blocks) > self.num_blocks[group]:
                raise LocalError(
                    f"{len(blocks)} blocks of group '{group}' are wanted, the cache has"
                    f" {self.num_blocks[group]}"
                )
        async with self._turn:
            while any(len(blocks) > len(self._free[group]) for group, blocks in wanted.items()):
                await self._freed.wait()
            return {
                group: BlockTable.of(self._pop(group, len(blocks)), first_block=blocks.start)
                for group, blocks in wanted.items()
            }

    def give(self, tables: Tables) -> None:
        """These blocks are free again; raises `LocalError` when one of them is already."""
        given = {group: table.array().tolist() for group, table in tables.items()}
        for group, ids in given.items():
            if not self._held[group].issuperset(ids) or len(set(ids)) < len(ids):
                raise LocalError(f"double free: blocks {ids} of group '{group}'")
        for group, ids in given.items():
            self._held[group].difference_update(ids)
            self._free[group] += ids
        self._freed.set()
        self._freed = anyio.Event()

    async def all_free(self) -> None:
        """Return when no request holds a block."""
        while self.num_held:
            await self._freed.wait()

    def _pop(self, group: str, number: int) -> list[int]:
        ids = [self._free[group].pop() for _ in range(number)]
        self._held[group].update(ids)
        return ids


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


def most_decode_blocks(group: GroupSpec, num_tokens: int, num_new: int) -> int:
    """How many a request of so many tokens, or fewer, can need; a window begins anywhere."""
    most = num_tokens + num_new
    if group.window is not None:
        most = min(most, group.window + num_new + group.block_size - 1)
    return num_blocks_for(most, group.block_size)
