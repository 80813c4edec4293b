"""Reports of free blocks: while vLLM lacks some, the prefill agent parks its offers."""

from typing import TYPE_CHECKING

from kvbus.engine import Link
from kvbus.geometry import num_blocks_for
from kvbus.integrations.vllm.params import Description

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

LEAST_FREE_SHARE = 0.1
"""Part of the cache that stays free for running requests, which grow."""


class BlockReports:
    def __init__(self, described: Description, link: Link, pool: "BlockPool") -> None:
        self._described, self._link, self._pool = described, link, pool
        self._num_wanted = 0

    def want(self, num_tokens: int) -> None:
        """Note that vLLM looks at a waiting request of ``num_tokens``."""
        self._num_wanted = num_whole_blocks(self._described, num_tokens)

    def fulfil(self) -> None:
        self._num_wanted = 0

    def report(self, *, may_park: bool) -> None:
        """Call this in each step, after vLLM has looked at waiting requests."""
        least = int(LEAST_FREE_SHARE * self._pool.num_gpu_blocks)
        low = max(least, self._num_wanted) if may_park else 0
        self._link.report_blocks(free=self._pool.get_num_free_blocks(), low=low)
        self._num_wanted = 0


def num_whole_blocks(described: Description, num_tokens: int) -> int:
    """Return the number of vLLM's blocks that hold a request; windows count for their length."""
    by_table: dict[int, int] = {}
    for group, source in zip(described.engine.groups, described.sources, strict=True):
        start, stop = group.positions(0, num_tokens)
        num_kernel = 1 if group.state else source.num_kernel_blocks
        num_blocks = num_blocks_for(stop - start, group.block_size * num_kernel)
        at = source.transfer_group
        by_table[at] = max(num_blocks, by_table.get(at, 0))
    return sum(by_table.values())
