"""Owns which blocks of the demo engine's KV cache are free.

Refuses to hand a block to two owners: a block freed twice, or never allocated, is an error.
"""

from collections.abc import Iterable

from kvbus.errors import ErrorCode, LocalError


class BlockAllocator:
    """A free list. The block freed last is handed out first, so ids soon lie in no order."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(reversed(range(num_blocks)))
        self._allocated: set[int] = set()

    @property
    def num_free(self) -> int:
        """How many blocks `allocate` could still hand out."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes all the blocks asked for, or none: raises `LocalError` with code ``busy``."""
        if num_blocks < 0:
            raise LocalError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > self.num_free:
            raise LocalError(
                f"the KV cache is full: {num_blocks} blocks asked for, {self.num_free} free",
                code=ErrorCode.BUSY,
                num_blocks=num_blocks,
                num_free=self.num_free,
            )
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        self._allocated.update(block_ids)
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Gives blocks back, all or, when one of them is not allocated, none: `LocalError`."""
        returned = list(block_ids)
        unowned = sorted(set(returned) - self._allocated)
        if unowned or len(set(returned)) < len(returned):
            raise LocalError(f"double free: of blocks {returned}, not allocated: {unowned}")
        self._allocated.difference_update(returned)
        self._free.extend(returned)
