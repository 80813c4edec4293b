"""What a client gets: a server's response passed on, or an error in the form of the OpenAI API.

Refuses to change a server's status or body; headers say which servers had the request.
"""

import json
from dataclasses import dataclass, field

import httpx
from starlette.types import Send

from kvbus.integrations.proxy.access_log import RequestRecord
from kvbus.integrations.proxy.servers import Server
from kvbus.integrations.proxy.upstream import Headers

# Those of one connection only, and those that the proxy's own HTTP server writes.
NOT_PASSED_BACK = frozenset(
    b"connection keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding "
    b"upgrade date server x-request-id".split()
)
ERROR_FROM = "x-kvbus-error-from"


@dataclass
class ClientResponse:
    """A whole response; ``headers`` are those that it has beside the record's."""

    status: int
    body: bytes
    headers: Headers = field(default_factory=list)

    async def send(self, send: Send, record: RequestRecord) -> None:
        """Send it, and note how the request ended."""
        record.ended(self.status)
        length = (b"content-length", str(len(self.body)).encode())
        await start(send, self.status, [*self.headers, length], record)
        await send({"type": "http.response.body", "body": self.body})


async def start(send: Send, status: int, headers: Headers, record: RequestRecord) -> None:
    """Send status and headers."""
    said = {
        "x-request-id": record.request_id,
        "x-kvbus-prefill": record.prefill,
        "x-kvbus-decode": record.decode,
    }
    ours = [(name.encode(), value.encode("latin-1")) for name, value in said.items() if value]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *ours]})


def passed_on(server: Server, response: httpx.Response) -> ClientResponse:
    """The response of ``server``, which was read whole, as its own."""
    kept = [(n, v) for n, v in headers_of(server, response) if n != b"content-length"]
    return ClientResponse(response.status_code, response.content, kept)


def headers_of(server: Server, response: httpx.Response) -> Headers:
    """The headers of a server's response that the client is to see."""
    raw = ((name.lower(), value) for name, value in response.headers.raw)
    kept = [(name, value) for name, value in raw if name not in NOT_PASSED_BACK]
    return [*kept, _error_from(server)] if response.is_error else kept


def refusal(status: int, kind: str, message: str, server: Server | None = None) -> ClientResponse:
    """An error of the proxy itself; ``server`` is whose failure it reports."""
    headers: Headers = [(b"content-type", b"application/json")]
    if server is not None:
        headers.append(_error_from(server))
    return ClientResponse(status, json.dumps(_error(status, kind, message)).encode(), headers)


def broken_stream(message: str) -> bytes:
    """The last event of a stream that its server broke off."""
    return f"\n\ndata: {json.dumps(_error(502, 'server_lost', message))}\n\n".encode()


def _error(status: int, kind: str, message: str) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _error_from(server: Server) -> tuple[bytes, bytes]:
    return ERROR_FROM.encode(), str(server).encode("latin-1")
