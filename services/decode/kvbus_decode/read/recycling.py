"""Ends READs that never end: has NIXL made anew, or else ends the process, to be started anew.

Refuses to wait for ever: what keeps NIXL from it within `WITHIN_S` keeps it from all else, too. But
while this machine's own link is down there is no interface to make it for: that is tried again.
"""

import asyncio
import os

import anyio
import structlog

from kvbus.agent.service import Agent
from kvbus.errors import KVBusError, TransferFailed
from kvbus.transport.types import RecycleReport
from kvbus_decode.read.table import RecycleTransport

log = structlog.get_logger()

GRACE_S = 2.0
"""How long READs of other peers may take to end; a slice of them is posted at most."""
WITHIN_S = 30.0
AGAIN_S = 1.0
EXIT_STATUS = 75
"""EX_TEMPFAIL: whoever supervises the agent starts it anew, and nothing else has to be done."""


class Recycling:
    """Has the transport made anew, once at a time."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._under_way, self._is_unlinked = False, False

    def begin(self, _: RecycleTransport) -> None:
        """Some READs never end."""
        if not self._under_way:
            self._under_way = True
            self._agent.tasks.start_soon(self._recycle)

    async def _recycle(self) -> None:
        stats = self._agent.transport.stats()
        log.warning("transport.recycling", num_handles=stats.outstanding_handles)
        while (report := await self._try()) is None:  # noqa: ASYNC110 - a link tells nobody
            await anyio.sleep(AGAIN_S)
        if self._is_unlinked:
            self._is_unlinked = False
            log.info("transport.linked", interfaces=list(self._agent.data_plane.interfaces))
        log.warning("transport.recycled", num_handles=report.num_handles)
        await self._agent.data_plane.end_if_exposed()
        self._under_way = False

    async def _try(self) -> RecycleReport | None:
        """None when no new NIXL can be made now: all is as it was, and nothing has ended."""
        try:
            with anyio.fail_after(WITHIN_S):
                recycled = self._agent.transport.recycle(grace_s=GRACE_S)
                return await asyncio.wrap_future(recycled)
        except (TimeoutError, KVBusError) as error:
            if isinstance(error, TransferFailed) and self._agent.data_plane.is_down():
                if not self._is_unlinked:
                    self._is_unlinked = True
                    down = list(self._agent.data_plane.interfaces)
                    log.warning("transport.unlinked", interfaces=down, reason=error.message)
                return None
            reason = str(error) or f"NIXL has kept its thread for {WITHIN_S:g} s"
            log.critical("transport.stuck", reason=reason, exit_status=EXIT_STATUS)
            os._exit(EXIT_STATUS)
