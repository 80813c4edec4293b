"""The application: its routes, and what lives as long as it does.

Refuses global state: all of it is in one `Proxy`, of which a process may have several.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvbus.errors import PeerLost
from kvbus.integrations.proxy.bodies import ServerRequest, passed_on, refusal
from kvbus.integrations.proxy.forwarding import Forwarding
from kvbus.integrations.proxy.options import ProxyOptions
from kvbus.integrations.proxy.servers import check_health
from kvbus.integrations.proxy.upstream import Upstream

GENERATING = ("/v1/completions", "/v1/chat/completions")


class Proxy:
    """One proxy; ``asgi`` is what an HTTP server runs."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options, self._upstream = options, Upstream(options)
        self._pools = self._upstream.prefill, self._upstream.decode
        self._servers = [server for pool in self._pools for server in pool.servers]
        self._forwarding = Forwarding(options, self._upstream)
        self.asgi = Starlette(
            routes=[
                *(Route(path, self._forwarding, methods=["POST"]) for path in GENERATING),
                Route("/v1/models", self._models),
                Route("/health", self._show_health),
                Route("/metrics", self._show_metrics),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Health checks have connections of their own: a full proxy keeps its servers well."""
        timeout_s = self._options.health_timeout_s
        checks = httpx.AsyncClient(timeout=timeout_s, trust_env=False)
        async with self._upstream.client, checks, anyio.create_task_group() as tasks:
            await check_health(checks, self._servers)
            tasks.start_soon(self._check_health, checks)
            self._forwarding.releases.tasks = tasks
            yield
            self._forwarding.releases.tasks = None
            tasks.cancel_scope.cancel()

    async def _check_health(self, client: httpx.AsyncClient) -> None:
        while True:
            await anyio.sleep(self._options.health_interval_s)
            await check_health(client, self._servers)

    async def _show_health(self, _: Request) -> Response:
        ready = all(pool.any_healthy for pool in self._pools)
        seen: dict[str, object] = {
            pool.role: {server.url: server.trouble or "healthy" for server in pool.servers}
            for pool in self._pools
        }
        return JSONResponse({"ready": ready, **seen}, status_code=200 if ready else 503)

    async def _show_metrics(self, _: Request) -> Response:
        registry = self._forwarding.access_log.registry
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, request: Request) -> Response:
        told = refusal(503, "no_decode_server", "no decode server is healthy")
        asked = ServerRequest(request)
        for server in self._upstream.decode.in_turn():
            told = refusal(504, "decode_silent", f"{server} does not answer", server)
            try:
                with anyio.move_on_after(self._options.health_timeout_s):
                    told = passed_on(server, await self._upstream.whole(server, asked))
                    break
            except PeerLost as error:
                told = refusal(502, "decode_lost", error.message, server)
        return told
