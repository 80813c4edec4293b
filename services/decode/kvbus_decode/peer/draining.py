"""Asks prefill agents to go on serving what is still in flight to us, when its lease has ended.

Over TCP a READ ends only when the other side is driven. An agent drives itself while a lease is
live, and a little longer; who was stopped for longer than that has to ask.
"""

from collections.abc import Callable

import anyio
import structlog

from kvbus.agent.service import Agent
from kvbus.errors import KVBusError
from kvbus_decode.active import ActiveFetch
from kvbus_decode.peer.memory_check import check_memory

log = structlog.get_logger()

PERIOD_S = 1.0


class Draining:
    """Fetches that have failed while something may still land; ``is_over`` says that none can."""

    def __init__(self, agent: Agent, is_over: Callable[[str], bool]) -> None:
        self._agent, self._is_over = agent, is_over

    def begin(self, fetch: ActiveFetch) -> None:
        """Ask until its blocks are free."""
        self._agent.tasks.start_soon(self._ask_on, fetch)

    async def _ask_on(self, fetch: ActiveFetch) -> None:
        while not self._is_over(fetch.fetch_id):
            self._ask(fetch)
            await anyio.sleep(PERIOD_S)

    def _ask(self, fetch: ActiveFetch) -> None:
        """One agent after the other: what one refuses is no reason not to ask the next."""
        if fetch.route is None:
            return
        for source in fetch.route.sources:
            check_memory(
                fetch.route,
                (source,),
                fetch.requested.ticket.offer_id,
                timeout_s=PERIOD_S,
                on_end=_note,
                progress_s=2 * PERIOD_S,
            )


def _note(error: KVBusError | None) -> None:
    """A peer that does not answer is asked again; one that lost the memory drives nothing."""
    if error is not None:
        log.debug("drain.refused", code=error.code.value, reason=error.message)
