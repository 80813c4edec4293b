"""Gives the memory of engine processes back, when nothing touches it any more."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import structlog

from kvbus.agent.engines.local_engine import EngineProcess, LocalEngine
from kvbus.agent.process.loop import in_thread
from kvbus.errors import KVBusError
from kvbus.memory.pages import Pages
from kvbus.transport import Transport

log = structlog.get_logger()

MOST_KEPT = 4096
"""Mappings of zeros that stay when their engine is gone, of those that the machine allows."""


class Quiet(Protocol):
    """Who knows what touches the memory of a lost engine."""

    async def copied(self, engine: LocalEngine) -> None:
        """Return when no copy can any more."""

    async def quiesce(self, engine: LocalEngine) -> None:
        """Return when no transfer can either."""


class MemoryReturn:
    """Unmaps what was passed; ``quiet`` is asked for when an engine is lost."""

    def __init__(self, transport: Transport, quiet: Callable[[], Quiet]) -> None:
        self._transport, self._quiet = transport, quiet
        self._kept: deque[Pages] = deque(maxlen=MOST_KEPT)

    async def take_away(self, processes: list[EngineProcess], engine: LocalEngine) -> None:
        """Give the bytes back now and hang up then, so that who lives knows; at last the rest."""
        for process in processes:
            await in_thread(process.segments.discard)
            process.connection.hang_up()
        await self.give_back(processes, engine)

    async def give_back(
        self, processes: list[EngineProcess], engine: LocalEngine | None = None
    ) -> None:
        """Nothing but copies of ours touches unregistered memory: that goes first."""
        if engine is not None:
            await self._quiet().copied(engine)
        staged = [process for process in processes if not process.segments.direct]
        await self._unmap(staged)
        if engine is not None and len(staged) < len(processes):
            await self._quiet().quiesce(engine)
        await self._unmap([process for process in processes if process.segments.direct])

    # A reader that was stopped for longer than anybody waits for it has READs at UCX here, which go
    # on when it does. Over TCP UCX copies in this process, from addresses alone: where nothing is
    # mapped any more that ends the process, and where another engine's memory came to lie it sends
    # that. So the addresses that NIXL was told of stay what they are since the engine was lost,
    # zeros that take no memory. Only the oldest of very many go.
    async def _unmap(self, processes: list[EngineProcess]) -> None:
        for process in processes:
            pages = process.segments.registered_pages()
            try:
                await process.segments.unmap(self._transport)
                self._kept.extend(pages)
            except KVBusError as error:
                log.error("segment.kept", engine_id=process.engine_id, error=error.message)
