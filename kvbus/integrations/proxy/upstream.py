"""HTTP to the servers behind the proxy; leaving a request closes its connection.

Refuses to choose a server or to judge a response; one that cannot be reached is marked as lost.
A closed connection is how a server is told that nobody wants the answer any more: vLLM then
aborts the request.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import httpx

from kvbus.errors import ErrorCode, PeerLost
from kvbus.integrations.proxy.bodies import ServerRequest
from kvbus.integrations.proxy.options import ProxyOptions
from kvbus.integrations.proxy.servers import Server, ServerPool

# vLLM closes an idle connection after 5 s; a request sent at that moment would be lost.
KEEP_IDLE_S = 2.0


class Upstream:
    """All servers, and the connections to them, bounded by what the proxy has in flight."""

    def __init__(self, options: ProxyOptions) -> None:
        self.prefill = ServerPool("prefill", options.prefill)
        self.decode = ServerPool("decode", options.decode)
        connections = options.max_in_flight + options.max_releases
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=options.connect_timeout_s),
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=KEEP_IDLE_S),
            trust_env=False,
        )

    async def whole(self, server: Server, request: ServerRequest) -> httpx.Response:
        """The answer of ``server`` with its body; raises `PeerLost` when there is none."""
        async with self.streamed(server, request) as response:
            with translated(server):
                await response.aread()
            return response

    @asynccontextmanager
    async def streamed(
        self, server: Server, request: ServerRequest
    ) -> AsyncIterator[httpx.Response]:
        """The answer of ``server``, its body still to come; closed at the end of the block."""
        sent = self.client.build_request(
            request.http.method,
            server.url + request.target,
            headers=request.headers,
            content=None if request.body is None else json.dumps(request.body).encode(),
            extensions={"trace": request.trace},
        )
        with translated(server):
            response = await self.client.send(sent, stream=True)
        try:
            yield response
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()


@contextmanager
def translated(server: Server) -> Iterator[None]:
    """What httpx raises in the block is a `PeerLost` of ``server``."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        reason = str(error) or "no answer to the attempt to connect"
        server.lost(reason)
        raise PeerLost(
            f"{server} cannot be reached: {reason}",
            code=ErrorCode.PEER_UNREACHABLE,
            server=server.url,
        ) from error
    except httpx.RequestError as error:
        reason = str(error) or type(error).__name__
        raise PeerLost(f"{server} broke off: {reason}", server=server.url) from error
