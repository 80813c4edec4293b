"""Asks every server from time to time whether it is well, and keeps the pools up to date.

Refuses to share connections with requests: a full proxy must not make its servers look ill.
"""

from collections.abc import Iterable

import anyio
import httpx

from kvbus.integrations.proxy.options import ProxyOptions
from kvbus.integrations.proxy.servers import Server


class HealthChecks:
    """GET /health of each server; 200 in time is healthy, anything else is not."""

    def __init__(self, options: ProxyOptions, servers: Iterable[Server]) -> None:
        self._interval_s = options.health_interval_s
        self._servers = list(servers)
        self._client = httpx.AsyncClient(timeout=options.health_timeout_s, trust_env=False)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await anyio.sleep(self._interval_s)
            await self.check_all()

    async def check_all(self) -> None:
        """Check each server once, all at the same time."""
        async with anyio.create_task_group() as tasks:
            for server in self._servers:
                tasks.start_soon(self._check, server)

    async def _check(self, server: Server) -> None:
        try:
            response = await self._client.get(f"{server.url}/health")
        except httpx.RequestError as error:
            server.lost(f"/health: {str(error) or type(error).__name__}")
            return
        if response.status_code == httpx.codes.OK:
            server.found()
        else:
            server.lost(f"/health answered {response.status_code}")
