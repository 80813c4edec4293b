"""Reports of free pages: while SGLang lacks some, the prefill agent parks its offers."""

import time
from typing import Any

from kvbus.engine import Link
from kvbus.integrations.free_blocks import report_free

PERIOD_S = 0.005
"""SGLang's loop polls each sender, and does not rest."""


class PageReports:
    """``scheduler`` is SGLang's."""

    def __init__(self, link: Link, scheduler: Any) -> None:
        self._link, self._scheduler, self._next_s = link, scheduler, 0.0

    def report(self) -> None:
        """Report free tokens, unless it was done just now."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s, scheduler = now + PERIOD_S, self._scheduler
        budget = scheduler.token_to_kv_pool_allocator.create_prefill_budget(scheduler.tree_cache)
        waiting = scheduler.waiting_queue
        num_wanted = len(waiting[0].origin_input_ids) if waiting else 0
        free, total = int(budget.remaining_total), scheduler.max_total_num_tokens
        report_free(self._link, free=free, total=total, wanted=num_wanted)
