"""The end of an agent: a signal, the drain, and what the drain did not end.

It waits no longer than the configuration allows. A second signal ends the drain at once.
"""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import anyio
import structlog

from kvbus.agent.http import HttpPort
from kvbus.agent.service import Service
from kvbus.bus import RequestServer
from kvbus.protocol.engine import Leaving

log = structlog.get_logger()

Signals = AsyncIterator[signal.Signals]


@dataclass(slots=True)
class Ending:
    """The end of one agent; ``timeout_s`` is how long its drain may take."""

    service: Service
    engine_socket: RequestServer
    page: HttpPort
    timeout_s: float
    is_draining: bool = False

    async def run(self, signals: Signals) -> None:
        """Wait for a signal; refuse new work until the rest is over, or time is, or at a second."""
        received = await anext(signals)
        log.info("agent.draining", signal=received.name, timeout_s=self.timeout_s)
        self.is_draining = True
        self.service.start_draining()
        with anyio.move_on_after(self.timeout_s):
            await _first(self.service.drained, lambda: anext(signals))
        left = {name: count for name, count in self.service.counts().items() if count}
        self.service.stop()
        self.engine_socket.leave(Leaving())
        await self.page.stop()
        log.info("agent.drained", left=left)


async def _first(*calls: Callable[[], Awaitable[object]]) -> None:
    """Return when one of them has."""
    async with anyio.create_task_group() as race:

        async def run(call: Callable[[], Awaitable[object]]) -> None:
            await call()
            race.cancel_scope.cancel()

        for call in calls:
            race.start_soon(run, call)
