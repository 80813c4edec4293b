"""Proxy for trying out disaggregated serving: ``python -m kvbus.integrations.proxy``.

client ──▶ prefill server: one token, and a ticket ──▶ decode server with the ticket ──▶ client
"""

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

import anyio
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

from kvbus.errors import LocalError
from kvbus.output import fail
from kvbus.protocol.tools import known_trace

PARAMS = "kv_transfer_params"
GENERATING = ("/v1/completions", "/v1/chat/completions")

log = structlog.get_logger()


class Failed(LocalError):
    def __init__(
        self, why: str, *, status: int = 502, answer: httpx.Response | None = None
    ) -> None:
        super().__init__(why)
        error = {"message": why, "type": "proxy_error", "param": None, "code": status}
        self.answer = answer or httpx.Response(status, json={"error": error})


class ProxiedRequest:
    """A client's request. ``record`` has the fields of its log line."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.http, self.send, self.body = Request(scope, receive), send, dict[str, Any]()
        given = self.http.headers.get("x-request-id", "")
        self.request_id = given if 0 < len(given) <= 200 else uuid.uuid4().hex
        self.started_s, self.is_started = time.perf_counter(), False
        self.record: dict[str, Any] = {"request_id": self.request_id, "handover": "none"}

    @property
    def elapsed_s(self) -> float:
        return round(time.perf_counter() - self.started_s, 6)

    async def parse(self) -> None:
        try:
            self.body = json.loads(await self.http.body())
            self.body.pop(PARAMS, None)  # never trust a client's params
        except (ValueError, RecursionError, AttributeError, TypeError) as error:
            raise Failed(f"the body is not a JSON object: {error}", status=400) from error

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

    def for_prefill(self) -> dict[str, Any]:
        left_out = ("stream_options", "min_tokens")
        made = {key: value for key, value in self.body.items() if key not in left_out}
        if "max_completion_tokens" in made:
            made["max_completion_tokens"] = 1
        params: dict[str, Any] = {"do_remote_decode": True}
        if trace := known_trace(self.http.headers.get("traceparent", "")):
            params["traceparent"] = trace
        return {**made, "max_tokens": 1, "stream": False, PARAMS: params}

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.is_started, self.record["status"] = True, status
        forwarded = {key: headers.get(key, "") for key in ("content-type", "retry-after")}
        servers = {f"x-kvbus-{role}": self.record.get(role) for role in ("prefill", "decode")}
        sent = {**forwarded, **servers, "x-request-id": self.request_id}.items()
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in sent if value]
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})

    async def send_chunk(self, chunk: bytes = b"") -> None:
        await self.send({"type": "http.response.body", "body": chunk, "more_body": bool(chunk)})

    # A response that has begun gets no final chunk, so HTTP itself shows that it is incomplete.
    async def refuse(self, error: Failed) -> None:
        self.record["trouble"] = error.message
        if not self.is_started:
            await self.start(error.answer.status_code, error.answer.headers)
            await self.send_chunk(error.answer.content)
            await self.send_chunk()


def _num_prompts(prompt: object) -> int:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return int(prompt is not None)


class Proxy:
    """An ASGI application for the generating paths; ``asgi`` serves all paths.

    If prefill fails, decode computes the prompt. The client gets prefill's 4xx, and decode's
    errors.
    """

    def __init__(self, prefill: list[str], decode: list[str], *, timeout_s: float) -> None:
        self._pools, self._timeout_s = {"prefill": prefill, "decode": decode}, timeout_s
        self._turns = {role: itertools.cycle(urls) for role, urls in self._pools.items()}
        # vLLM closes an idle connection after 5 s; a request sent at that moment would be lost.
        limits = httpx.Limits(keepalive_expiry=2.0)
        timeout = httpx.Timeout(timeout_s, connect=5.0)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        routes = [Route(path, self, methods=["POST"]) for path in GENERATING]
        routes += [Route("/v1/models", self._models), Route("/health", self._health)]
        self.asgi = Starlette(routes=routes)

    async def _health(self, _: Request) -> Response:
        pools, seen = self._pools.values(), dict[str, str]()

        async def check(url: str) -> None:
            seen[url] = await self._state(url)

        async with anyio.create_task_group() as tasks:
            for url in {url for urls in pools for url in urls}:
                tasks.start_soon(check, url)
        is_ready = all("healthy" in map(seen.get, urls) for urls in pools)
        return JSONResponse({"ready": is_ready, **seen}, 200 if is_ready else 503)

    async def _state(self, url: str) -> str:
        try:
            answer = await self._client.get(f"{url}/health", timeout=5.0)
        except httpx.RequestError as error:
            return str(error) or type(error).__name__
        return "healthy" if answer.is_success else f"{answer.status_code}"

    async def _models(self, _: Request) -> Response:
        try:
            answer = await self._client.get(f"{next(self._turns['decode'])}/v1/models", timeout=5.0)
        except httpx.RequestError as error:
            return JSONResponse({"error": str(error) or type(error).__name__}, 503)
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, outcome = ProxiedRequest(scope, receive, send), "aborted"
        try:
            await call.http.body()
            async with anyio.create_task_group() as tasks:

                async def watch() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    tasks.cancel_scope.cancel()

                tasks.start_soon(watch)
                try:
                    await self._serve(call)
                except Failed as error:
                    await call.refuse(error)
                outcome = "answered"
                tasks.cancel_scope.cancel()
        except ClientDisconnect:
            pass
        finally:
            log.info("request.ended", outcome=outcome, **call.record, total_s=call.elapsed_s)

    async def _serve(self, call: ProxiedRequest) -> None:
        await call.parse()
        if reason := call.why_alone():
            call.record["handover"] = reason
            await self._answer(call, {})
        else:
            await self._answer(call, await self._prefilled(call))

    async def _prefilled(self, call: ProxiedRequest) -> Mapping[str, Any]:
        try:
            ticket = await self._request_ticket(call)
        except Failed as error:
            is_refused = error.answer.is_client_error
            call.record["handover"] = "refused" if is_refused else "prefill_failed"
            call.record["trouble"] = error.message
            if is_refused:
                raise
            return {}
        call.record["handover"] = "handed_over" if ticket else "not_offered"
        return {PARAMS: ticket} if ticket else {}

    async def _request_ticket(self, call: ProxiedRequest) -> dict[str, Any] | None:
        async with self._stream("prefill", call, call.for_prefill()) as answer:
            await answer.aread()
        call.record["prefill_s"] = call.elapsed_s
        why = f"prefill server {call.record['prefill']} answered {answer.status_code}"
        if answer.is_client_error:
            raise Failed(why, answer=answer)
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            if answer.status_code == httpx.codes.OK:
                ticket = answer.json().get(PARAMS)
                return ticket if isinstance(ticket, dict) else None
        raise Failed(f"{why} without a completion")

    async def _answer(self, call: ProxiedRequest, params: Mapping[str, Any]) -> None:
        async with self._stream("decode", call, {**call.body, **params}) as theirs:
            await call.start(theirs.status_code, theirs.headers)
            async for chunk in theirs.aiter_raw():
                call.record.setdefault("first_token_s", call.elapsed_s)
                await call.send_chunk(chunk)
        await call.send_chunk()

    @contextlib.asynccontextmanager
    async def _stream(
        self, role: str, call: ProxiedRequest, body: Mapping[str, Any]
    ) -> AsyncIterator[httpx.Response]:
        url = call.record[role] = next(self._turns[role])
        received = call.http.headers
        forwarded = ("authorization", "traceparent")
        headers = {name: received[name] for name in forwarded if name in received}
        headers |= {"x-request-id": call.request_id, "accept-encoding": "identity"}
        target = url + call.http.url.path
        try:
            async with self._client.stream("POST", target, headers=headers, json=body) as answer:
                yield answer
        except httpx.RequestError as error:
            why = f"{role} server {url} failed: {str(error) or type(error).__name__}"
            if isinstance(error, httpx.ReadTimeout):
                why = f"{role} server {url} has sent nothing for {self._timeout_s:g} s (--timeout)"
            raise Failed(why) from error


def _address(url: str) -> str:
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url.rstrip("/")
    raise typer.BadParameter(f"'{url}' is not a server address; write it as http://host:port")


def _servers(role: str, port: int) -> Any:
    told = f"A {role} server, as http://host:{port}; repeatable."
    return Option(metavar="URL", parser=_address, help=told)


Urls = list[str]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def proxy(
    *,
    prefill: Annotated[Urls, _servers("prefill", 8100)],
    decode: Annotated[Urls, _servers("decode", 8200)],
    host: Annotated[str, Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="The port; 0 for a free one.")] = 8000,
    timeout_s: Annotated[
        float, Option("--timeout", min=0.1, help="Seconds that a server may send nothing.")
    ] = 600.0,
) -> None:
    """Serve the OpenAI API with prefill and decode servers, for trying out disaggregated serving.

    Exit status 1: cannot listen on that address; 2: a mistake in an option.
    """
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
    asgi = Proxy(prefill, decode, timeout_s=timeout_s).asgi
    config = uvicorn.Config(asgi, ws="none", log_level="warning", timeout_graceful_shutdown=5)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again when it stops
    host, port = listening.getsockname()[:2]
    log.info("proxy.started", url=f"http://{host}:{port}", pid=os.getpid())
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    app(prog_name="python -m kvbus.integrations.proxy")
