"""HTTP to the servers behind the proxy; leaving a request closes its connection.

Refuses to choose a server or to judge a response; one that cannot be reached is marked as lost.
A closed connection is how a server is told that nobody wants the answer any more: vLLM then
aborts the request.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import anyio
import httpx

from kvbus.errors import ErrorCode, PeerLost
from kvbus.integrations.proxy.options import ProxyOptions
from kvbus.integrations.proxy.servers import Server

# vLLM closes an idle connection after 5 s; a request sent at that moment would be lost.
KEEP_IDLE_S = 2.0
BODY_SENT = "http11.send_request_body.complete"

Headers = list[tuple[bytes, bytes]]


@dataclass
class ServerRequest:
    """One request to a server; ``sent`` once the kernel has all of it."""

    method: str
    target: str
    headers: Headers
    body: Mapping[str, object] | None = None
    sent: bool = field(default=False, init=False)

    async def trace(self, event: str, _: object) -> None:
        """What httpcore reports of the request's way."""
        self.sent = self.sent or event == BODY_SENT


class Upstream:
    """The connections to all servers, bounded by what the proxy has in flight."""

    def __init__(self, options: ProxyOptions) -> None:
        connections = options.max_in_flight + options.max_releases
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=options.connect_timeout_s),
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=KEEP_IDLE_S),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def whole(self, server: Server, request: ServerRequest) -> httpx.Response:
        """The answer of ``server`` with its body; raises `PeerLost` when there is none."""
        async with self.streamed(server, request) as response:
            with _translated(server):
                await response.aread()
            return response

    @asynccontextmanager
    async def streamed(
        self, server: Server, request: ServerRequest
    ) -> AsyncIterator[httpx.Response]:
        """The answer of ``server``, its body still to come; closed at the end of the block."""
        sent = self._client.build_request(
            request.method,
            server.url + request.target,
            headers=request.headers,
            content=None if request.body is None else json.dumps(request.body).encode(),
            extensions={"trace": request.trace},
        )
        with _translated(server):
            response = await self._client.send(sent, stream=True)
        try:
            yield response
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()


async def relay(
    server: Server, response: httpx.Response, take: Callable[[bytes], Awaitable[None]]
) -> None:
    """Give ``take`` the body as it comes; raises `PeerLost` when the server breaks off."""
    with _translated(server):
        async for chunk in response.aiter_raw():
            await take(chunk)


@contextmanager
def _translated(server: Server) -> Iterator[None]:
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
