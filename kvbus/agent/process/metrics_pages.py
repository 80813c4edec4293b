"""The metrics page of an agent, and of the one that replaces it: one at a time has the address."""

import anyio
import structlog
from anyio.abc import TaskGroup

from kvbus.agent.process.metrics import AgentMetrics, MetricsPage
from kvbus.errors import ConfigError

log = structlog.get_logger()

TRY_AGAIN_S, NUM_TRIES = 0.25, 20


class MetricsPages:
    """The page at ``bind``, none when that is empty."""

    def __init__(self, metrics: AgentMetrics, bind: str, tasks: TaskGroup) -> None:
        self._metrics, self._bind, self._tasks = metrics, bind, tasks
        self._page: MetricsPage | None = None

    @property
    def port(self) -> int | None:
        """Of the page that is served, or will be; None while nobody knows it."""
        configured = self._bind.rpartition(":")[2]
        if self._page is not None:
            return self._page.port
        return int(configured) if configured.isdigit() and int(configured) else None

    def serve(self) -> None:
        """Raises `ConfigError` when the address cannot be bound."""
        if self._bind:
            self._page = self._metrics.serve(self._bind)

    def serve_again(self) -> None:
        """Once the address is free: a process that has ended may have it for a moment yet."""
        self._tasks.start_soon(self._serve_again)

    async def stop(self) -> None:
        """Free the address."""
        page, self._page = self._page, None
        if page is not None:
            await anyio.to_thread.run_sync(page.stop)

    async def _serve_again(self) -> None:
        for _ in range(NUM_TRIES):
            try:
                self.serve()
            except ConfigError as error:
                reason = error.message
                await anyio.sleep(TRY_AGAIN_S)
            else:
                return
        log.warning("metrics.unserved", reason=reason)
