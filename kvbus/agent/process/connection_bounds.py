"""The bounds of an agent's TCP sockets: from the config to the guard, and from it to the log.

Refuses to decide anything: `kvbus.bus.guard` does.
"""

import asyncio

import structlog

from kvbus.agent.process.config import AgentConfig
from kvbus.agent.process.limited_log import LimitedLog
from kvbus.bus import BusContext, ConnectionGuard, DoorLimits, Ended, Watch

log = structlog.get_logger()

_MAX_EVENTS_UNREAD_BYTES = 64 * 1024
_MAX_SUBSCRIPTIONS = 256


class ConnectionBounds:
    """Watches the peer and the events socket of one agent while `run` runs."""

    def __init__(self, context: BusContext, config: AgentConfig) -> None:
        self._config = config
        self._lines = LimitedLog(lines_s=config.max_refusal_lines_s)
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self.guard = ConnectionGuard(
            context,
            on_ended=self._on_ended,
            on_short=self._on_short,
            on_broken=self._on_broken,
        )

    def peer_socket(self) -> Watch:
        """Watches a ROUTER for peers."""
        config = self._config.connections
        limits = DoorLimits(
            connections=config.max_connections,
            connections_by_address=config.max_by_address,
            new_by_address_s=config.max_new_by_address_s,
            unread_bytes=config.max_unread_bytes,
            unsent_bytes=config.max_unsent_bytes,
        )
        return lambda socket: self.guard.watch(socket, "peer", limits)

    def events_socket(self) -> Watch:
        """Watches a publisher, to which nothing is said but subscriptions."""
        config = self._config.connections
        limits = DoorLimits(
            connections=config.max_connections,
            connections_by_address=config.max_by_address,
            new_by_address_s=config.max_new_by_address_s,
            unread_bytes=_MAX_EVENTS_UNREAD_BYTES,
            unsent_bytes=config.max_unsent_bytes,
            messages=_MAX_SUBSCRIPTIONS,
        )
        return lambda socket: self.guard.watch(socket, "events", limits)

    async def run(self) -> None:
        """Guard the sockets until cancelled; raises what the guard ended by, as a defect."""
        self.guard.start()
        try:
            await self._broken
        finally:
            self.guard.close()

    def _on_broken(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: Exception) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    def _on_ended(self, socket: str, ended: Ended, num_connections: int) -> None:
        self._loop.call_soon_threadsafe(self._log_ended, socket, ended, num_connections)

    def _log_ended(self, socket: str, ended: Ended, num_connections: int) -> None:
        self._lines.warning(
            "connection.ended",
            who=ended.address,
            socket=socket,
            address=ended.address,
            reason=ended.reason.value,
            num_connections=num_connections,
        )

    def _on_short(self, short: bool) -> None:
        self._loop.call_soon_threadsafe(self._log_short, short)

    def _log_short(self, short: bool) -> None:
        if short:
            log.error("descriptors.exhausted", connections=self.guard.num_connections)
        else:
            log.info("descriptors.recovered", connections=self.guard.num_connections)
