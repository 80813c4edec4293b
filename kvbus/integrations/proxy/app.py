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
from kvbus.integrations.proxy.answers import passed_on, refusal
from kvbus.integrations.proxy.asked import Asked, headers_for_servers, request_id_of, target_of
from kvbus.integrations.proxy.bodies import Params
from kvbus.integrations.proxy.decoding import Decoding
from kvbus.integrations.proxy.forwarding import Forwarding
from kvbus.integrations.proxy.health import HealthChecks
from kvbus.integrations.proxy.options import ProxyOptions
from kvbus.integrations.proxy.prefilling import Prefilling
from kvbus.integrations.proxy.record import Ledger
from kvbus.integrations.proxy.releases import Releases
from kvbus.integrations.proxy.servers import Role, ServerPool
from kvbus.integrations.proxy.upstream import Call, Upstream

GENERATING = ("/v1/completions", "/v1/chat/completions")


class Proxy:
    """One proxy; ``asgi`` is what an HTTP server runs."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self._prefill = ServerPool(Role.PREFILL, options.prefill)
        self._decode = ServerPool(Role.DECODE, options.decode)
        self._ledger = Ledger()
        self._upstream = Upstream(options)
        self._health = HealthChecks(options, [*self._prefill, *self._decode])
        self._releases = Releases(options, self._upstream, self._decode)
        self._tasks: TaskGroup | None = None
        prefilling = Prefilling(self._upstream, self._prefill, options.if_prefill_fails)
        decoding = Decoding(self._upstream, self._decode, self._give_back)
        forwarding = Forwarding(options, self._ledger, prefilling, decoding)
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

    def _give_back(self, asked: Asked, params: Params) -> None:
        if self._tasks is not None:
            self._releases.start(self._tasks, asked, params)

    async def _show_health(self, _: Request) -> Response:
        ready = self._prefill.any_healthy and self._decode.any_healthy
        seen: dict[str, object] = {
            pool.role: {server.url: server.trouble or "healthy" for server in pool}
            for pool in (self._prefill, self._decode)
        }
        return JSONResponse({"ready": ready, **seen}, status_code=200 if ready else 503)

    async def _show_metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._ledger.registry), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, request: Request) -> Response:
        answer = refusal(503, "no_decode_server", "no decode server is healthy")
        headers = headers_for_servers(request.scope, request_id_of(request.scope))
        for server in self._decode.in_turn():
            call = Call("GET", target_of(request.scope), headers)
            answer = refusal(504, "decode_silent", f"{server} does not answer", server)
            try:
                with anyio.move_on_after(self._options.health_timeout_s):
                    answer = passed_on(server, await self._upstream.whole(server, call))
                    break
            except PeerLost as error:
                answer = refusal(502, "decode_lost", error.message, server)
        made = Response(answer.body, answer.status)
        made.raw_headers += answer.headers
        return made
