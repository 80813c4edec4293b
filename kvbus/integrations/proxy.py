"""Router for trying disaggregated serving: ``python -m kvbus.integrations.proxy``.

    client ──▶ prefill server: one token, and a ticket ──▶ decode server with the ticket ──▶ client

With ``--overlap`` both servers get the request at the same time. With ``--first-token prefill`` a
stream begins with the prefill server's token. The proxy uses servers in turn, and does not know
their load: docs/routers.md names routers for production.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import anyio
import msgspec
import structlog
import typer
from typer import Option

try:
    import httpx
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.stderr.write(f"error: the proxy needs {error.name}: pip install 'kvbus[proxy]'\n")
    raise SystemExit(1) from None

from kvbus.errors import LocalError, ProtocolError
from kvbus.output import fail
from kvbus.protocol.ticket import Rendezvous, Ticket
from kvbus.protocol.tools import known_trace

PARAMS = "kv_transfer_params"
COMPLETIONS = "/v1/completions"
GENERATING = (COMPLETIONS, "/v1/chat/completions")
MAX_BODY_BYTES = 64 << 20
MAX_CONNECTIONS = 1024
REST_S = 2.0
"""Time without requests for a server that could not be reached."""

SIMPLE = {
    *("model", "prompt", "stream", "max_tokens", "ignore_eos", "user", "priority", "cache_salt"),
    *("temperature", "top_p", "top_k", "min_p"),
}
"""Request keys that give the same second token, whichever server makes the first."""
USUAL_MAX_TOKENS = 16
"""Default of the completions API."""

T = TypeVar("T")
log = structlog.get_logger()


class Failed(LocalError):
    """An error for the client, with the server's own ``answer`` if there is one.

    If it ``may_go_on``, the proxy tries the next server first.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        may_go_on: bool = False,
        answer: httpx.Response | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.may_go_on = status, kind, may_go_on
        error = {"message": message, "type": kind, "param": None, "code": status}
        self.body = json.dumps({"error": error}).encode() if answer is None else answer.content
        json_is: Mapping[str, str] = {"content-type": "application/json"}
        self.headers = json_is if answer is None else answer.headers


class Server:
    """A server. A prefill server's latest ``ticket`` names the agent beside it."""

    def __init__(self, role: str, url: str) -> None:
        with contextlib.suppress(ValueError):
            parts = urlsplit(url)
            if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                self.role, self.url, self.rests_until_s = role, url.rstrip("/"), 0.0
                self.ticket: Ticket | None = None
                return
        raise typer.BadParameter(f"--{role} '{url}' is no address: give it as http://host:port")

    def __str__(self) -> str:
        return f"{self.role} server {self.url}"

    @property
    def rests(self) -> bool:
        return time.monotonic() < self.rests_until_s


class ClientRequest:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.http, self.send, self.body = Request(scope, receive), send, dict[str, Any]()
        given = self.http.headers.get("x-request-id", "")
        self.request_id = given if 0 < len(given) <= 200 else uuid.uuid4().hex
        self.started_s, self.is_started = time.perf_counter(), False
        self.wants_first = False
        self.first: First | None = None
        self.record: dict[str, Any] = {"request_id": self.request_id, "handover": "none"}
        """Fields of its log line; times in seconds."""

    @property
    def so_far_s(self) -> float:
        return round(time.perf_counter() - self.started_s, 6)

    async def read(self) -> None:
        text = bytearray()
        async for chunk in self.http.stream():
            text += chunk
            if len(text) > MAX_BODY_BYTES:
                raise Failed(413, "too_large", f"the body has more than {MAX_BODY_BYTES} bytes")
        try:
            self.body = json.loads(bytes(text))
            self.body.pop(PARAMS, None)  # never trust a client's params
        except (ValueError, RecursionError, AttributeError, TypeError) as error:
            raise Failed(400, "malformed", f"the body is not a JSON object: {error}") from error

    def why_alone(self) -> str | None:
        """Return why decode must compute the prompt itself: a ticket covers one sequence."""
        prompts = [self.body.get(key) for key in ("prompt", "prompt_embeds")]
        if any(isinstance(n := self.body.get(key), int) and n > 1 for key in ("n", "best_of")):
            return "several_sequences"
        if self.body.get("use_beam_search"):
            return "beam_search"
        if sum(map(_num_prompts, prompts)) > 1:
            return "several_prompts"
        if self.body.get("echo") or self.body.get("prompt_logprobs") is not None:
            return "prompt_asked_back"
        return None

    def may_go_on_behind_first(self) -> bool:
        """Return whether a stream can begin with one server's token and continue with another's.

        Decode receives the first token as the last of its prompt. Options that count or inspect the
        tokens of an answer would miss it.
        """
        given = {key: value for key, value in self.body.items() if value not in (None, False)}
        is_stream = self.http.url.path == COMPLETIONS and given.get("stream") is True
        has_more = isinstance(most := given.get("max_tokens", USUAL_MAX_TOKENS), int) and most > 1
        return is_stream and has_more and given.keys() <= SIMPLE

    def for_prefill(self, **params: str) -> Mapping[str, Any]:
        left_out = ("stream_options", "min_tokens")
        made = {key: value for key, value in self.body.items() if key not in left_out}
        if "max_completion_tokens" in made:
            made["max_completion_tokens"] = 1
        if trace := known_trace(self.http.headers.get("traceparent", "")):
            params["traceparent"] = trace
        if self.wants_first:
            made["return_token_ids"] = True
        asked = {"do_remote_decode": True, **params}
        return {**made, "max_tokens": 1, "stream": False, PARAMS: asked}

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.is_started, self.record["status"] = True, status
        passed = {key: headers.get(key, "") for key in ("content-type", "retry-after")}
        ours = {f"x-kvbus-{role}": self.record.get(role) for role in ("prefill", "decode")}
        named = {**passed, **ours, "x-request-id": self.request_id}.items()
        raw = [(name.encode(), value.encode("latin-1")) for name, value in named if value]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def go_on(self, chunk: bytes = b"") -> None:
        """Send a part of the body; an empty chunk ends it."""
        await self.send({"type": "http.response.body", "body": chunk, "more_body": bool(chunk)})

    # A response that has begun gets no final chunk, so HTTP itself shows that it is incomplete.
    async def refuse(self, error: Failed) -> None:
        self.record["trouble"] = error.message
        if not self.is_started:
            await self.start(error.status, error.headers)
            await self.go_on(error.body)
            await self.go_on()


class First(msgspec.Struct, frozen=True):
    event: bytes
    prompt_and_token: list[int]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "First | None":
        """Return None if decode must make the token itself.

        With a sliding window, prefill omits the last token of the prompt, so its token is not the
        first of an answer. A token may also be part of a character.
        """
        try:
            (choice,) = answer["choices"]
            prompt, (token,), text = choice["prompt_token_ids"], choice["token_ids"], choice["text"]
            is_of_all = answer[PARAMS]["remote_num_tokens"] == len(prompt)
            head = {key: answer[key] for key in ("id", "created", "model")}
            if not is_of_all or choice["finish_reason"] != "length" or text[-1:] in ("", "\ufffd"):
                return None
            said = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
        except (KeyError, TypeError, ValueError):
            return None
        event = {**head, "object": "text_completion", "choices": [said]}
        return cls(b"data: %b\n\n" % json.dumps(event).encode(), [*prompt, token])


def _num_prompts(prompt: object) -> int:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return int(prompt is not None)


class Proxy:
    """An ASGI application for the generating paths; ``asgi`` serves all paths.

    A prefill server fails if it is unreachable, disconnects, or answers anything but 200 or 4xx.
    The proxy then tries the next; if all fail, ``refuses`` decides. A 4xx goes to the client. An
    unreachable decode server has not seen the ticket, so the next one gets it; other errors go to
    the client. If the client disconnects, the proxy closes its connections, and vLLM aborts.
    """

    def __init__(
        self,
        prefill: list[Server],
        decode: list[Server],
        *,
        timeout_s: float,
        refuses: bool,
        overlap: bool,
        first_of_prefill: bool,
    ) -> None:
        self._prefill, self._decode, self._num_in_flight = prefill, decode, 0
        self._timeout_s, self._refuses, self._overlap = timeout_s, refuses, overlap
        self._first_of_prefill = first_of_prefill
        # vLLM closes an idle connection after 5 s; a request sent at that moment would be lost.
        limits = httpx.Limits(max_connections=2 * MAX_CONNECTIONS, keepalive_expiry=2.0)
        timeout = httpx.Timeout(timeout_s, connect=5.0, pool=None)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        routes = [Route(path, self, methods=["POST"]) for path in GENERATING]
        routes += [Route("/v1/models", self._models), Route("/health", self._health)]
        self.asgi = Starlette(routes=routes)

    async def _health(self, _: Request) -> Response:
        servers, seen = [*self._prefill, *self._decode], dict[str, str]()

        async def check(server: Server) -> None:
            try:
                answer = await self._client.get(f"{server.url}/health", timeout=5.0)
                seen[server.url] = "healthy" if answer.is_success else f"{answer.status_code}"
                server.rests_until_s = 0.0
            except httpx.RequestError as error:
                seen[server.url] = str(error) or type(error).__name__

        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(check, server)
        is_ready = len({one.role for one in servers if seen[one.url] == "healthy"}) == 2
        told = {"ready": is_ready, "in_flight": self._num_in_flight, **seen}
        return JSONResponse(told, 200 if is_ready else 503)

    async def _models(self, _: Request) -> Response:
        for server in _in_turn(self._decode):
            with contextlib.suppress(httpx.RequestError):
                answer = await self._client.get(f"{server.url}/v1/models", timeout=5.0)
                return Response(answer.content, answer.status_code, media_type="application/json")
        return JSONResponse({"error": "no decode server answers"}, 503)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, outcome = ClientRequest(scope, receive, send), "stopped"
        self._num_in_flight += 1
        try:
            await call.read()
            async with anyio.create_task_group() as tasks:

                async def watch() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    tasks.cancel_scope.cancel()

                tasks.start_soon(watch)
                await self._serve(call)
                outcome = "answered"
                tasks.cancel_scope.cancel()
            if outcome == "stopped":
                outcome = "client_gone"
        except ClientDisconnect:
            outcome = "client_gone"
        except Failed as error:
            outcome = "answered"
            await call.refuse(error)
        finally:
            self._num_in_flight -= 1
            log.info("request.ended", outcome=outcome, **call.record, total_s=call.so_far_s)

    async def _serve(self, call: ClientRequest) -> None:
        try:
            if reason := call.why_alone():
                call.record["handover"] = reason
                await self._answer(call, {})
            elif self._first_of_prefill and call.may_go_on_behind_first():
                await self._serve_first(call)
            elif not (self._overlap and await self._serve_at_once(call)):
                await self._answer(call, await self._prefilled(call))
        except Failed as error:
            await call.refuse(error)

    async def _prefilled(self, call: ClientRequest) -> Mapping[str, Any]:
        try:
            ticket = await _first("prefill", self._prefill, partial(self._ticket, call))
        except Failed as error:
            has_none = error.kind == "no_prefill_server"
            failed = error.kind if has_none else "prefill_failed"
            call.record["handover"] = failed if error.may_go_on else "refused"
            call.record["trouble"] = error.message
            if self._refuses or not error.may_go_on:
                raise
            return {}
        call.record["handover"] = "handed_over" if ticket else "not_offered"
        return {PARAMS: ticket} if ticket else {}

    async def _serve_first(self, call: ClientRequest) -> None:
        call.wants_first = True
        params = await self._prefilled(call)
        if (first := call.first) is None:
            await self._answer(call, params)
            return
        await call.start(200, {"content-type": "text/event-stream; charset=utf-8"})
        call.record["first_token_s"] = call.so_far_s
        await call.go_on(first.event)
        num_left = (call.body.get("max_tokens") or USUAL_MAX_TOKENS) - 1
        left = {"prompt": first.prompt_and_token, "max_tokens": num_left}
        await self._answer(call, {**params, **left})

    async def _serve_at_once(self, call: ClientRequest) -> bool:
        """Return False, to start over, if no response has begun."""
        server = next((one for one in self._prefill if not one.rests), None)
        if server is None or (at := server.ticket) is None:
            return False
        next(_in_turn(self._prefill))  # this server
        meets = Rendezvous(uuid.uuid4().hex, at.endpoint, at.server_key, request_id=call.request_id)
        call.record["handover"] = "met"
        mistakes: list[Failed] = []
        async with anyio.create_task_group() as tasks:

            async def prefill() -> None:
                try:
                    await self._ticket(call, server, transfer_id=meets.transfer_id)
                except Failed as error:
                    call.record["trouble"] = error.message
                    if not call.is_started:
                        if not error.may_go_on:
                            call.record["handover"] = "refused"
                            mistakes.append(error)
                        tasks.cancel_scope.cancel()

            tasks.start_soon(prefill)
            named = {"do_remote_prefill": True, "do_remote_decode": False}
            try:
                await self._answer(call, {PARAMS: {**named, "rendezvous": meets.to_json()}})
            except Failed as error:
                mistakes.append(error)
            tasks.cancel_scope.cancel()
        if mistakes:
            raise mistakes[0]
        return call.is_started

    async def _ticket(self, call: ClientRequest, server: Server, **params: str) -> Any:
        async with self._asked(server, call, call.for_prefill(**params)) as answer:
            await answer.aread()
        call.record["prefill_s"] = call.so_far_s
        said = f"{server} answered {answer.status_code}"
        if answer.is_error:
            may_go_on = answer.is_server_error
            raise Failed(
                answer.status_code, "prefill_failed", said, may_go_on=may_go_on, answer=answer
            )
        failed = Failed(502, "prefill_failed", f"{said} without a completion", may_go_on=True)
        if answer.status_code != httpx.codes.OK:
            raise failed
        try:
            ticket = (told := answer.json())[PARAMS]
        except KeyError:
            return None
        except (ValueError, RecursionError, TypeError) as error:
            raise failed from error
        with contextlib.suppress(ProtocolError, AttributeError):  # it may not be kvbus's
            seen = Ticket.from_json(ticket.get("ticket"))
            server.ticket = None if seen.signature else seen  # the proxy has no key to sign with
        if call.wants_first:
            call.first = First.of(told)
        return ticket if isinstance(ticket, dict) else None

    async def _answer(self, call: ClientRequest, params: Mapping[str, Any]) -> None:
        async def answer(server: Server) -> None:
            async with self._asked(server, call, {**call.body, **params}) as theirs:
                if not call.is_started:
                    await call.start(theirs.status_code, theirs.headers)
                elif theirs.is_error:
                    raise Failed(502, "decode_failed", f"{server} answered {theirs.status_code}")
                async for chunk in theirs.aiter_raw():
                    call.record.setdefault("first_token_s", call.so_far_s)
                    await call.go_on(chunk)
            await call.go_on()

        await _first("decode", self._decode, answer)

    @contextlib.asynccontextmanager
    async def _asked(
        self, server: Server, call: ClientRequest, body: Mapping[str, Any]
    ) -> AsyncIterator[httpx.Response]:
        call.record[server.role] = server.url
        given = call.http.headers
        headers = {name: given[name] for name in ("authorization", "traceparent") if name in given}
        headers |= {"x-request-id": call.request_id, "accept-encoding": "identity"}
        url = server.url + call.http.url.path
        try:
            async with self._client.stream("POST", url, headers=headers, json=body) as answer:
                yield answer
        except httpx.RequestError as error:
            why = f"{server} broke off: {str(error) or type(error).__name__}"
            if isinstance(error, httpx.ReadTimeout):
                why = f"{server} has sent nothing for {self._timeout_s:g} s (--timeout)"
            is_unreached = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            if is_unreached:
                server.rests_until_s = time.monotonic() + REST_S
            may_go_on = is_unreached or server.role == "prefill"
            raise Failed(502, f"{server.role}_lost", why, may_go_on=may_go_on) from error


def _in_turn(pool: list[Server]) -> Iterator[Server]:
    for server in list(pool):
        if not server.rests:
            pool.remove(server)
            pool.append(server)
            yield server


async def _first(role: str, pool: list[Server], ask: Callable[[Server], Awaitable[T]]) -> T:
    none = f"no {role} server can be reached"
    failure = Failed(503, f"no_{role}_server", none, may_go_on=True)
    for server in _in_turn(pool):
        try:
            return await ask(server)
        except Failed as error:
            failure = error
            if not error.may_go_on:
                break
    raise failure


Urls = list[str]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def proxy(
    *,
    prefill: Annotated[
        Urls, Option(metavar="URL", help="A prefill server, as http://host:8100; repeatable.")
    ],
    decode: Annotated[
        Urls, Option(metavar="URL", help="A decode server, as http://host:8200; repeatable.")
    ],
    host: Annotated[str, Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="The port; 0 for a free one.")] = 8000,
    timeout_s: Annotated[
        float, Option("--timeout", min=0.1, help="Seconds that a server may send nothing.")
    ] = 600.0,
    if_prefill_fails: Annotated[
        Literal["decode", "refuse"],
        Option(help="A decode server computes the prompt itself, or the client gets the error."),
    ] = "decode",
    first_token: Annotated[
        Literal["decode", "prefill"],
        Option(
            help="Which server's token a stream of completions begins with. From prefill it comes"
            " before the KV has moved; a request with other keys than the plain ones of sampling"
            " begins with decode's all the same."
        ),
    ] = "decode",
    overlap: Annotated[
        bool,
        Option(
            help="Send a request to both servers at once, so that KV moves while it is computed."
            " Not before a prefill server's first ticket, nor where the site signs tickets."
        ),
    ] = False,
) -> None:
    """Serve the OpenAI API with prefill and decode servers, for trying out disaggregated serving.

    Exit status 1: cannot listen on that address; 2: a mistake in an option.
    """
    made = Proxy(
        [Server("prefill", url) for url in prefill],
        [Server("decode", url) for url in decode],
        timeout_s=timeout_s,
        refuses=if_prefill_fails == "refuse",
        overlap=overlap,
        first_of_prefill=first_token == "prefill",
    )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        fail(f"cannot listen on {host} port {port}: {error}", status=1, cause=error)
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    structlog.configure(
        processors=[stamp, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    config = uvicorn.Config(
        made.asgi,
        ws="none",
        log_level="warning",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=5,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again when it stops
    host, port = listening.getsockname()[:2]
    log.info("proxy.started", url=f"http://{host}:{port}", pid=os.getpid())
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    app(prog_name="python -m kvbus.integrations.proxy")
