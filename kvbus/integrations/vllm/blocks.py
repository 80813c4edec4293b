"""Reports of free blocks: while vLLM lacks some, the prefill agent parks its offers."""

from typing import TYPE_CHECKING

from kvbus.engine import Link
from kvbus.geometry import num_blocks_for
from kvbus.integrations.free_blocks import report_free
from kvbus.integrations.vllm.params import Description

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


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
        free, total = self._pool.get_num_free_blocks(), self._pool.num_gpu_blocks
        if may_park:
            report_free(self._link, free=free, total=total, wanted=self._num_wanted)
        else:  # nothing to park: the last report may have been of a lack
            self._link.report_blocks(free=free, low=0)
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
