"""When an agent ends, and how: by a signal, or because a successor has its engines.

Refuses to wait longer than the configuration allows. A second signal ends the drain at once.
"""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import anyio
import structlog
from anyio.abc import TaskGroup

from kvbus.agent.http.port import HttpPort
from kvbus.agent.process.handover import Handover
from kvbus.agent.process.service import Service

log = structlog.get_logger()

FLUSH_S, MOST_FLUSHES = 0.2, 25

Signals = AsyncIterator[signal.Signals]


@dataclass(slots=True)
class Ending:
    """The end of one agent; ``timeout_s`` is how long its drain may take."""

    service: Service
    handover: Handover
    page: HttpPort
    timeout_s: float
    num_unacknowledged: Callable[[], int]
    is_draining: bool = False

    async def wait(self, signals: Signals) -> None:
        """Return when it is to end: at a signal, or when the engines went to a successor.

        A signal while they go is for who comes after them: the engines have their time.
        """
        async with anyio.create_task_group() as race:
            race.start_soon(self._leave, race)
            received = await anext(signals)
            if self.handover.successor:
                await _first(self.handover.resumed, lambda: anext(signals))
            log.info("agent.draining", signal=received.name, timeout_s=self.timeout_s)
            race.cancel_scope.cancel()

    async def drain(self, signals: Signals) -> None:
        """Refuse new work; return when the rest is over, at the deadline, or at a signal."""
        self.is_draining = self.handover.is_ending = True
        self.handover.refusal = "the agent is draining, and ends soon"
        self.service.start_draining()
        with anyio.move_on_after(self.timeout_s):
            await _first(self.service.drained, lambda: anext(signals))
        left = {name: count for name, count in self.service.counts().items() if count}
        self.service.stop()
        await self.page.stop()
        await self._flush()
        log.info("agent.drained", left=left)

    async def _leave(self, race: TaskGroup) -> None:
        await self.handover.left(self.timeout_s)
        log.info("agent.replaced", successor=self.handover.successor, in_time=self.handover.is_left)
        race.cancel_scope.cancel()

    async def _flush(self) -> None:
        """What was just said has to leave the sockets; an engine that lives has heard of it."""
        for _ in range(MOST_FLUSHES):
            await anyio.sleep(FLUSH_S)
            if not self.num_unacknowledged():
                return


async def _first(*calls: Callable[[], Awaitable[object]]) -> None:
    """Return when one of them has."""
    async with anyio.create_task_group() as race:

        async def run(call: Callable[[], Awaitable[object]]) -> None:
            await call()
            race.cancel_scope.cancel()

        for call in calls:
            race.start_soon(run, call)
