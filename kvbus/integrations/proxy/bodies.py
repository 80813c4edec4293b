"""What comes from a client and what goes to it: bodies, and the headers that are passed on.

One ticket names one sequence of one prompt: what it cannot carry is told by `why_alone`. A
server's status and body are not changed; headers say which servers had the request.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvbus.errors import ErrorCode, LocalError
from kvbus.integrations.proxy.access_log import RequestRecord
from kvbus.integrations.proxy.servers import Server
from kvbus.protocol.trace import known_trace

Headers = list[tuple[bytes, bytes]]
TransferParams = Mapping[str, Any]

TRANSFER_PARAMS = "kv_transfer_params"
CONVERSATION_ID = "conversation_id"
TRACEPARENT = "traceparent"
ONLY_FOR_MANY_TOKENS = ("stream_options", "min_tokens")
BODY_SENT = "http11.send_request_body.complete"
LONGEST_REQUEST_ID = 200

_OF_ONE_CONNECTION = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te"),
    *(b"trailer", b"transfer-encoding", b"upgrade", b"x-request-id"),
}
# Those of one connection only, and those that the proxy writes itself.
NOT_PASSED_ON = _OF_ONE_CONNECTION | {
    *(b"proxy-authorization", b"host", b"content-length", b"content-type", b"expect"),
    b"accept-encoding",
}
# Those of one connection only, and those that the proxy's own HTTP server writes.
NOT_PASSED_BACK = _OF_ONE_CONNECTION | {b"date", b"server"}


class NotServed(LocalError):
    """The proxy itself answers this request, with ``status``."""

    def __init__(self, status: int, message: str, code: ErrorCode = ErrorCode.MALFORMED) -> None:
        super().__init__(message, code=code)
        self.status = status


@dataclass
class ServerRequest:
    """A client's request as a server gets it; ``sent`` once the kernel has all of it."""

    http: Request
    body: Mapping[str, object] | None = None
    sent: bool = field(default=False, init=False)

    @property
    def target(self) -> str:
        """The path, and the query."""
        query = str(self.http.scope["query_string"], "latin-1")
        return str(self.http.scope["path"]) + f"?{query}" * bool(query)

    @property
    def headers(self) -> Headers:
        """The client's, as far as they are passed on, and those of the proxy."""
        return [
            *((name, value) for name, value in self.http.headers.raw if name not in NOT_PASSED_ON),
            (b"content-type", b"application/json"),
            (b"accept-encoding", b"identity"),  # the bytes go through as they are
            (b"x-request-id", request_id_of(self.http).encode("latin-1")),
        ]

    async def trace(self, event: str, _: object) -> None:
        """What httpcore reports of the request's way."""
        self.sent = self.sent or event == BODY_SENT


@dataclass(frozen=True)
class ClientRequest:
    """One request of a client that is read."""

    http: Request
    body: Mapping[str, Any]
    record: RequestRecord
    conversation_id: str | None = None

    def for_one_token(self, params: TransferParams) -> ServerRequest:
        """What has a server compute or load the prompt, make one token, and end."""
        left_out = (*ONLY_FOR_MANY_TOKENS, CONVERSATION_ID)
        made = {key: value for key, value in self.body.items() if key not in left_out}
        made |= {"max_tokens": 1, "stream": False, TRANSFER_PARAMS: {**params, **self._trace()}}
        if "max_completion_tokens" in made:
            made["max_completion_tokens"] = 1
        return ServerRequest(self.http, made)

    def _trace(self) -> Mapping[str, str]:
        """The client's trace: a vLLM that sends no spans itself drops the header."""
        trace = known_trace(self.http.headers.get(TRACEPARENT, ""))
        return {TRACEPARENT: trace} if trace else {}

    def for_decode(self, params: TransferParams | None) -> ServerRequest:
        """The client's request with ``params``; what it brought under that name is not trusted."""
        left_out = (TRANSFER_PARAMS, CONVERSATION_ID)
        made = {key: value for key, value in self.body.items() if key not in left_out}
        if params is not None:
            made[TRANSFER_PARAMS] = params
        return ServerRequest(self.http, made)


async def read_body(request: Request, *, max_bytes: int) -> Mapping[str, Any]:
    """The object of a client; raises `NotServed`, or `ClientDisconnect` of Starlette."""
    read = bytearray()
    async for chunk in request.stream():
        read += chunk
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


def request_id_of(request: Request) -> str:
    """The client's X-Request-Id, or a new one, which stays."""
    given = request.headers.get("x-request-id", "")
    if not 0 < len(given) <= LONGEST_REQUEST_ID:
        given = uuid.uuid4().hex
    return str(request.scope.setdefault("kvbus.request_id", given))


def why_alone(body: Mapping[str, Any]) -> str | None:
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


def _num_prompts(prompt: object) -> int:
    if prompt is None:
        return 0
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def passed_on(server: Server, response: httpx.Response) -> Response:
    """The response of ``server``, which was read whole, as its own."""
    told = Response(response.content, response.status_code)
    headers = headers_of(server, response)
    told.raw_headers += [(name, value) for name, value in headers if name != b"content-length"]
    return told


def headers_of(server: Server, response: httpx.Response) -> Headers:
    """The headers of a server's response that the client is to see."""
    raw = ((name.lower(), value) for name, value in response.headers.raw)
    kept = [(name, value) for name, value in raw if name not in NOT_PASSED_BACK]
    return [*kept, _error_from(server)] if response.is_error else kept


def refusal(status: int, kind: str, message: str, server: Server | None = None) -> Response:
    """An error of the proxy itself, as the OpenAI API has it; ``server`` is whose failure it is."""
    told = JSONResponse(_error(status, kind, message), status)
    if server is not None:
        told.raw_headers.append(_error_from(server))
    return told


def broken_stream(message: str) -> bytes:
    """The last event of a stream that its server broke off."""
    return f"\n\ndata: {json.dumps(_error(502, 'server_lost', message))}\n\n".encode()


def _error(status: int, kind: str, message: str) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _error_from(server: Server) -> tuple[bytes, bytes]:
    return b"x-kvbus-error-from", str(server).encode("latin-1")
