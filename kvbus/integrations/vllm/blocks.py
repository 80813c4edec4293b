"""vLLM's blocks: those that a handoff needs, and those that are kept while others read them."""

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec, GroupSpec, num_blocks_for

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

NULL_BLOCK = 0
"""vLLM's placeholder for the blocks that a window has left behind: there is no KV in it."""
STEPS_ON_S = 1.0
"""How long vLLM goes on with steps after an offer: most are read by then, and their blocks free.

Those that are released later are freed when the next request comes, as nothing wakes vLLM.
"""

BlockIds = Sequence[Sequence[int]]
"""By group, in order of position, from the request's first block."""


class Tables(NamedTuple):
    """Block ids by group, and the block of the request with which each table starts.

    In ``partial`` blocks, each the first of a window, the window does not begin with the block.
    """

    block_ids: dict[str, list[int]]
    first_blocks: dict[str, int]
    partial: set[int]


def tables_of(engine: EngineSpec, block_ids: BlockIds, first_token: int, num_tokens: int) -> Tables:
    """The blocks of tokens [first_token, num_tokens); ``block_ids`` are in order of the groups.

    Raises `GeometryError` where vLLM does not keep one of them.
    """
    tables = Tables({}, {}, set())
    for group, ids in zip(engine.groups, block_ids, strict=True):
        start, stop = group.positions(first_token, num_tokens)
        if start < stop:
            first = start // group.block_size
            tables.block_ids[group.name] = _needed(group, ids, first, stop)
            tables.first_blocks[group.name] = first
            if start > max(first_token, first * group.block_size):
                tables.partial.add(tables.block_ids[group.name][0])
    return tables


def _needed(group: GroupSpec, ids: Sequence[int], first: int, stop: int) -> list[int]:
    end = num_blocks_for(stop, group.block_size)
    needed = list(ids[first:end])
    if len(needed) < end - first or NULL_BLOCK in needed:
        raise GeometryError(
            f"group '{group.name}': vLLM keeps {len(ids)} blocks of the request, and not all of "
            f"blocks {first} to {end} that tokens up to {stop} need",
            group=group.name,
        )
    return needed


# The connector has a reference of its own to the blocks of an offer. So a request is over for vLLM
# when it is computed, and an engine whose offers nobody reads yet rests: a request that vLLM itself
# keeps for its blocks makes it step without a pause. What is freed while vLLM uses it, or is not
# held, gives another request's KV to a reader.
#
#     request ends ──▶ hold: 2 references ──▶ vLLM frees: 1 ──▶ offer released ──▶ free: 0
class HeldBlocks:
    """The blocks of offers in vLLM's pool; for the scheduler's thread.

    With ``drains`` vLLM waits at its end for the offers that are awaited.
    """

    def __init__(self, pool: "BlockPool", *, drains: bool) -> None:
        self._pool, self._drains = pool, drains
        self._held: dict[str, list[KVCacheBlock]] = {}
        self._awaited: set[str] = set()
        self._last_s = 0.0

    def hold(self, offer_id: str, block_ids: BlockIds, *, is_awaited: bool = True) -> None:
        """Keep the blocks of an offer, whose request still has them.

        The readers of one that ``is_awaited`` come soon.
        """
        blocks = [self._pool.blocks[one] for ids in block_ids for one in ids if one != NULL_BLOCK]
        self._pool.touch(blocks)
        self._held[offer_id] = blocks
        if is_awaited:
            self._awaited.add(offer_id)
            self._last_s = time.monotonic()

    def free(self, offer_ids: Iterable[str]) -> None:
        """These offers were released: nobody reads their blocks."""
        for offer_id in offer_ids:
            self._awaited.discard(offer_id)
            # As vLLM does it: the end of a prompt is dropped from the prefix cache first.
            self._pool.free_blocks(reversed(self._held.pop(offer_id)))

    def uncache(self, block_ids: Iterable[int]) -> bool:
        """Take blocks out of vLLM's prefix cache; whether any was there."""
        cached = {one for one in block_ids if self._pool.blocks[one].block_hash is not None}
        self._pool.evict_blocks(cached)
        return bool(cached)

    @property
    def needs_steps(self) -> bool:
        """Whether vLLM is to go on with steps, though it has nothing to compute."""
        if not self._awaited:
            return False
        return self._drains or time.monotonic() - self._last_s < STEPS_ON_S
