"""The HTTP port of an agent, and of the one that replaces it: one at a time has the address."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import anyio
import structlog
from anyio.abc import TaskGroup

from kvbus.agent.http.answer import Route
from kvbus.agent.http.door import Door
from kvbus.agent.process.addresses import http_address
from kvbus.agent.process.config import AgentConfig
from kvbus.errors import ConfigError

if TYPE_CHECKING:
    from kvbus.agent.http.server import HttpServer

log = structlog.get_logger()

TRY_AGAIN_S, NUM_TRIES = 0.25, 20


class HttpPort:
    """The port at ``http_bind``, none when that is empty."""

    def __init__(self, config: AgentConfig, routes: Mapping[str, Route], tasks: TaskGroup) -> None:
        """Raises `ConfigError` when strangers could ask there."""
        self._bind, self._routes, self._tasks = config.http_bind, routes, tasks
        self._door = Door.open(config)
        self._server: HttpServer | None = None

    @property
    def number(self) -> int | None:
        """Of the port that is served, or will be; None while nobody knows it."""
        if self._server is not None:
            return self._server.port
        return (http_address(self._bind)[1] or None) if self._bind else None

    def serve(self) -> None:
        """Raises `ConfigError` when the address cannot be bound."""
        if not self._bind:
            return
        # waitress is a twentieth of the time of a start, and not every agent has such a port.
        from kvbus.agent.http.server import HttpServer  # noqa: PLC0415

        self._server = HttpServer(self._bind, self._routes, self._door)

    def serve_again(self) -> None:
        """Once the address is free: a process that has ended may have it for a moment yet."""
        self._tasks.start_soon(self._serve_again)

    async def stop(self) -> None:
        """Free the address."""
        server, self._server = self._server, None
        if server is not None:
            await anyio.to_thread.run_sync(server.stop)

    async def _serve_again(self) -> None:
        for _ in range(NUM_TRIES):
            try:
                self.serve()
            except ConfigError as error:
                reason = error.message
                await anyio.sleep(TRY_AGAIN_S)
            else:
                return
        log.warning("http.unserved", reason=reason)
