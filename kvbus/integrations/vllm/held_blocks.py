"""The blocks that are offered: kept in vLLM's pool by a reference of the connector's own.

So a request is over for vLLM when it is computed, and an engine whose offers nobody reads yet
rests: a request that vLLM itself keeps for its blocks makes it step without a pause. For the
scheduler's thread; who frees what vLLM still uses, or forgets to hold, gives another request's KV
to a reader.

    request ends ──▶ hold: 2 references ──▶ vLLM frees: 1 ──▶ offer released ──▶ free: 0
"""

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvbus.integrations.vllm.block_tables import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

STEPS_ON_S = 1.0
"""How long vLLM goes on with steps after an offer: most are read by then, and their blocks free.

Those that are released later are freed when the next request comes, as nothing wakes vLLM.
"""


class HeldBlocks:
    """Blocks by offer; with ``drains`` vLLM waits for those awaited before it ends."""

    def __init__(self, pool: "BlockPool", *, drains: bool) -> None:
        self._pool, self._drains = pool, drains
        self._held: dict[str, list[KVCacheBlock]] = {}
        self._awaited: set[str] = set()
        self._last_s = 0.0

    def hold(
        self, offer_id: str, block_ids: Iterable[Sequence[int]], *, is_awaited: bool = True
    ) -> None:
        """Keep the blocks of an offer, by group; its request still has them.

        One that ``is_awaited`` is going to be read soon.
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
