"""The application: its routes, and what lives as long as it does.

Refuses global state: all of it is in one `Proxy`, of which a process may have several.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvbus.errors import PeerLost
from kvbus.integrations.proxy.access_log import AccessLog
from kvbus.integrations.proxy.client_request import (
    ClientRequest,
    TransferParams,
    headers_for_servers,
    request_id_of,
    target_of,
)
from kvbus.integrations.proxy.forwarding import Forwarding
from kvbus.integrations.proxy.health import HealthChecks
from kvbus.integrations.proxy.options import ProxyOptions
from kvbus.integrations.proxy.releases import TicketReleases
from kvbus.integrations.proxy.responses import passed_on, refusal
from kvbus.integrations.proxy.servers import Role, ServerPool
from kvbus.integrations.proxy.upstream import ServerRequest, Upstream

GENERATING = ("/v1/completions", "/v1/chat/completions")


class Proxy:
    """One proxy; ``asgi`` is what an HTTP server runs."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self._prefill = ServerPool(Role.PREFILL, options.prefill)
        self._decode = ServerPool(Role.DECODE, options.decode)
        self._access_log = AccessLog()
        self._upstream = Upstream(options)
        self._health = HealthChecks(options, [*self._prefill, *self._decode])
        self._releases = TicketReleases(options, self._upstream, self._decode)
        self._tasks: TaskGroup | None = None
        forwarding = Forwarding(
            options,
            self._access_log,
            self._upstream,
            prefill=self._prefill,
            decode=self._decode,
            on_unused=self._release,
        )
        self.asgi = Starlette(
            routes=[
                *(Route(path, forwarding, methods=["POST"]) for path in GENERATING),
                Route("/v1/models", self._models),
                Route("/health", self._show_health),
                Route("/metrics", self._show_metrics),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            async with anyio.create_task_group() as tasks:
                await self._health.check_all()
                tasks.start_soon(self._health.run)
                self._tasks = tasks
                yield
                self._tasks = None
                tasks.cancel_scope.cancel()
        finally:
            await self._upstream.close()
            await self._health.close()

    def _release(self, request: ClientRequest, params: TransferParams) -> None:
        if self._tasks is not None:
            self._releases.start(self._tasks, request, params)

    async def _show_health(self, _: Request) -> Response:
        ready = self._prefill.any_healthy and self._decode.any_healthy
        seen: dict[str, object] = {
            pool.role: {server.url: server.trouble or "healthy" for server in pool}
            for pool in (self._prefill, self._decode)
        }
        return JSONResponse({"ready": ready, **seen}, status_code=200 if ready else 503)

    async def _show_metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._access_log.registry), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, request: Request) -> Response:
        told = refusal(503, "no_decode_server", "no decode server is healthy")
        headers = headers_for_servers(request.scope, request_id_of(request.scope))
        for server in self._decode.in_turn():
            asked = ServerRequest("GET", target_of(request.scope), headers)
            told = refusal(504, "decode_silent", f"{server} does not answer", server)
            try:
                with anyio.move_on_after(self._options.health_timeout_s):
                    told = passed_on(server, await self._upstream.whole(server, asked))
                    break
            except PeerLost as error:
                told = refusal(502, "decode_lost", error.message, server)
        response = Response(told.body, told.status)
        response.raw_headers += told.headers
        return response
