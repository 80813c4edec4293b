"""The second step of a request: a decode server's answer goes to the client as it comes.

Refuses to ask a second server once one may have used the ticket.
"""

from collections.abc import Callable

import httpx
from starlette.types import Send

from kvbus.errors import ErrorCode, PeerLost
from kvbus.integrations.proxy.answers import broken_stream, headers_of, refusal, start
from kvbus.integrations.proxy.asked import Asked
from kvbus.integrations.proxy.bodies import Params, decode_body
from kvbus.integrations.proxy.record import Outcome, RequestRecord
from kvbus.integrations.proxy.servers import Server, ServerPool
from kvbus.integrations.proxy.upstream import Call, Upstream, relay

GiveBack = Callable[[Asked, Params], None]


class Decoding:
    """Sends the request to the next healthy decode server that can be reached.

    A server that cannot be reached has not seen the ticket, so the next one gets it. Any other end
    is the client's answer. Where no server was sent the ticket, ``give_back`` is called with it.
    """

    def __init__(self, upstream: Upstream, servers: ServerPool, give_back: GiveBack) -> None:
        self._upstream = upstream
        self._servers = servers
        self._give_back = give_back

    async def answer(self, asked: Asked, params: Params | None, send: Send) -> None:
        """Answer the client; cancelled at any point, the server's connection is closed."""
        call = asked.call(decode_body(asked.body, params))
        try:
            await self._try_servers(asked.record, call, send)
        finally:
            if params is not None and not call.sent:
                self._give_back(asked, params)

    async def _try_servers(self, record: RequestRecord, call: Call, send: Send) -> None:
        refused = None
        for server in self._servers.in_turn():
            record.decode = server.url
            try:
                async with self._upstream.streamed(server, call) as response:
                    await _stream(server, response, send, record)
                return
            except PeerLost as error:
                record.trouble = error.message
                refused = refusal(502, "decode_lost", error.message, server)
                if error.code is not ErrorCode.PEER_UNREACHABLE:
                    break
        if refused is None:
            record.outcome = Outcome.UNAVAILABLE
            refused = refusal(503, "no_decode_server", "no decode server is healthy")
        await refused.send(send, record)


async def _stream(
    server: Server, response: httpx.Response, send: Send, record: RequestRecord
) -> None:
    record.status = response.status_code
    await start(send, response.status_code, headers_of(server, response), record)

    async def take(chunk: bytes) -> None:
        record.saw_bytes()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})

    try:
        await relay(server, response, take)
    except PeerLost as error:
        record.trouble, record.outcome = error.message, Outcome.FAILED
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            await take(broken_stream(error.message))
        return  # without an end, so that HTTP itself says that the answer is not whole
    record.ended(response.status_code)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
