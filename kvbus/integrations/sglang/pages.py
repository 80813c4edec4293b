"""Reports of free pages: while SGLang lacks some, the prefill agent parks its offers."""

import time
from typing import Any

from kvbus.engine import Link

LEAST_FREE_SHARE = 0.1
"""Part of the cache that stays free for requests that are computed in chunks."""
PERIOD_S = 0.005
"""SGLang's loop polls each sender, and does not rest."""


class PageReports:
    """``scheduler`` is SGLang's."""

    def __init__(self, link: Link, scheduler: Any) -> None:
        self._link, self._scheduler, self._next_s = link, scheduler, 0.0

    def report(self) -> None:
        """Report, unless it was done just now; both numbers count tokens."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s, scheduler = now + PERIOD_S, self._scheduler
        budget = scheduler.token_to_kv_pool_allocator.create_prefill_budget(scheduler.tree_cache)
        waiting = scheduler.waiting_queue
        num_wanted = len(waiting[0].origin_input_ids) if waiting else 0
        least = int(LEAST_FREE_SHARE * scheduler.max_total_num_tokens)
        self._link.report_blocks(free=int(budget.remaining_total), low=max(least, num_wanted))
