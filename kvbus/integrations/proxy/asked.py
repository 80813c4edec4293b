"""What a client asked for: the body that was read, and the headers that go on to the servers.

Refuses a body that is too large or no JSON object, and a client that left before its end.
"""

import json
import uuid
from dataclasses import dataclass

from starlette.types import Receive, Scope

from kvbus.errors import ErrorCode, RemoteError, RequestRefused
from kvbus.integrations.proxy.bodies import Body
from kvbus.integrations.proxy.record import RequestRecord
from kvbus.integrations.proxy.upstream import Call, Headers

REQUEST_ID = b"x-request-id"
LONGEST_REQUEST_ID = 200
# Those of one connection only, and those that the proxy writes itself.
NOT_PASSED_ON = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade host content-length content-type expect accept-encoding "
    b"x-request-id".split()
)


class ClientGone(RemoteError):
    """The client closed its connection."""

    default_code = ErrorCode.CANCELLED


@dataclass(frozen=True)
class Asked:
    """One request of a client."""

    target: str
    headers: Headers
    body: Body
    record: RequestRecord

    def call(self, body: Body) -> Call:
        """The same request with another body, for a server."""
        return Call("POST", self.target, self.headers, body)


def request_id_of(scope: Scope) -> str:
    """The client's X-Request-Id, or a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and 0 < len(value) <= LONGEST_REQUEST_ID:
            return str(value, "latin-1")
    return uuid.uuid4().hex


def target_of(scope: Scope) -> str:
    """Path and query, as they are asked of a server."""
    query = str(scope["query_string"], "latin-1")
    path = str(scope["path"])
    return f"{path}?{query}" if query else path


def headers_for_servers(scope: Scope, request_id: str) -> Headers:
    """The client's headers, authorization among them, that a server is to see."""
    kept = [(name, value) for name, value in scope["headers"] if name not in NOT_PASSED_ON]
    return [
        *kept,
        (b"content-type", b"application/json"),
        (b"accept-encoding", b"identity"),  # the bytes go through as they are
        (REQUEST_ID, request_id.encode("latin-1")),
    ]


async def read_body(receive: Receive, most_bytes: int) -> Body:
    """The body as an object; raises `RequestRefused`, or `ClientGone`."""
    read = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left before its request was read")
        read += message.get("body", b"")
        more = message.get("more_body", False)
        if len(read) > most_bytes:
            raise RequestRefused(
                f"the body has more than {most_bytes} bytes, the most that this proxy takes",
                code=ErrorCode.TOO_LARGE,
            )
    return _parsed(bytes(read))


def _parsed(text: bytes) -> Body:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}", code=ErrorCode.MALFORMED) from error
    if not isinstance(body, dict):
        raise RequestRefused("the body is not a JSON object", code=ErrorCode.MALFORMED)
    return body
