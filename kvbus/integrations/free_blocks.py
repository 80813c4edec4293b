"""When an engine lacks free blocks, so that its prefill agent parks offers."""

from kvbus.engine import Link

LEAST_FREE_SHARE = 0.1
"""Part of the cache that stays free for requests that grow."""


def report_free(link: Link, *, free: int, total: int, wanted: int) -> None:
    """Report free blocks, or tokens; ``wanted`` is what the next waiting request needs."""
    link.report_blocks(free=free, low=max(int(LEAST_FREE_SHARE * total), wanted))
