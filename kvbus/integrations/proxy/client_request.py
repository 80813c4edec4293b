"""What a client wants: its body, the headers that go on, and the requests of both steps.

Refuses a body that is too large or no JSON object, and a client that left before its end. One
ticket names one sequence of one prompt: what it cannot carry is told by `why_alone`.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope

from kvbus.errors import ErrorCode, LocalError, RemoteError
from kvbus.integrations.proxy.access_log import RequestRecord
from kvbus.integrations.proxy.upstream import Headers, ServerRequest

Body = dict[str, Any]
TransferParams = Mapping[str, Any]

TRANSFER_PARAMS = "kv_transfer_params"
ASK_FOR_TICKET: TransferParams = {"do_remote_decode": True}
ONLY_FOR_MANY_TOKENS = ("stream_options", "min_tokens")

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


class NotServed(LocalError):
    """The proxy itself answers this request, with ``status``."""

    def __init__(self, status: int, message: str, code: ErrorCode = ErrorCode.MALFORMED) -> None:
        super().__init__(message, code=code)
        self.status = status


@dataclass(frozen=True)
class ClientRequest:
    """One request of a client."""

    target: str
    headers: Headers
    body: Body
    record: RequestRecord

    @classmethod
    async def read(
        cls, scope: Scope, receive: Receive, record: RequestRecord, *, max_bytes: int
    ) -> "ClientRequest":
        """The whole request; raises `NotServed`, or `ClientGone`."""
        body = await _read_body(receive, max_bytes)
        headers = headers_for_servers(scope, record.request_id)
        return cls(target_of(scope), headers, body, record)

    def for_one_token(self, params: TransferParams) -> ServerRequest:
        """What has a server compute or load the prompt, make one token, and end."""
        made = {key: value for key, value in self.body.items() if key not in ONLY_FOR_MANY_TOKENS}
        made |= {"max_tokens": 1, "stream": False, TRANSFER_PARAMS: params}
        if "max_completion_tokens" in made:
            made["max_completion_tokens"] = 1
        return ServerRequest("POST", self.target, self.headers, made)

    def for_decode(self, params: TransferParams | None) -> ServerRequest:
        """The client's request with ``params``; what it brought under that name is not trusted."""
        made = {key: value for key, value in self.body.items() if key != TRANSFER_PARAMS}
        if params is not None:
            made[TRANSFER_PARAMS] = params
        return ServerRequest("POST", self.target, self.headers, made)


def why_alone(body: Body) -> str | None:
    """Why a decode server must compute this prompt itself, or None when it need not."""
    counts = (body.get(key) for key in ("n", "best_of"))
    if any(isinstance(count, int) and count > 1 for count in counts):
        return "several_sequences"
    if body.get("use_beam_search"):
        return "beam_search"
    if sum(_num_prompts(body.get(key)) for key in ("prompt", "prompt_embeds")) > 1:
        return "several_prompts"
    if body.get("echo") or body.get("prompt_logprobs") is not None:
        return "prompt_asked_back"
    return None


def request_id_of(scope: Scope) -> str:
    """The client's X-Request-Id, or a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and 0 < len(value) <= LONGEST_REQUEST_ID:
            return str(value, "latin-1")
    return uuid.uuid4().hex


def target_of(scope: Scope) -> str:
    """Path and query, as they are asked of a server."""
    query = str(scope["query_string"], "latin-1")
    return f"{scope['path']}?{query}" if query else str(scope["path"])


def headers_for_servers(scope: Scope, request_id: str) -> Headers:
    """The client's headers, authorization among them, that a server is to see."""
    return [
        *((name, value) for name, value in scope["headers"] if name not in NOT_PASSED_ON),
        (b"content-type", b"application/json"),
        (b"accept-encoding", b"identity"),  # the bytes go through as they are
        (REQUEST_ID, request_id.encode("latin-1")),
    ]


async def _read_body(receive: Receive, max_bytes: int) -> Body:
    read = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left before its request was read")
        read += message.get("body", b"")
        more = message.get("more_body", False)
        if len(read) > max_bytes:
            text = f"the body has more than {max_bytes} bytes, the most that this proxy takes"
            raise NotServed(413, text, ErrorCode.TOO_LARGE)
    try:
        body = json.loads(bytes(read))
    except (ValueError, RecursionError) as error:
        raise NotServed(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise NotServed(400, "the body is not a JSON object")
    return body


def _num_prompts(prompt: object) -> int:
    if prompt is None:
        return 0
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1
