"""Gives the memory of engine processes back, when nothing touches it any more."""

from collections.abc import Callable
from typing import Protocol

import structlog

from kvbus.agent.engines.local_engine import EngineProcess, LocalEngine
from kvbus.errors import KVBusError
from kvbus.transport import Transport

log = structlog.get_logger()


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

    async def _unmap(self, processes: list[EngineProcess]) -> None:
        for process in processes:
            try:
                await process.segments.unmap(self._transport)
            except KVBusError as error:
                log.error("segment.kept", engine_id=process.engine_id, error=error.message)
