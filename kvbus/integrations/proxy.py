"""A router for trying disaggregated serving: ``python -m kvbus.integrations.proxy``.

    client ──▶ prefill server: one token, and a ticket ──▶ decode server with the ticket ──▶ client

With ``--overlap`` both get a request at once, and a name for the offer. Servers take turns, and
their load is not known: docs/routers.md names routers for production.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
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

from kvbus.errors import ConfigError, LocalError, ProtocolError
from kvbus.options import with_options
from kvbus.output import fail
from kvbus.protocol.ticket import Rendezvous, Ticket
from kvbus.protocol.trace import known_trace

PARAMS = "kv_transfer_params"
MAX_BODY_BYTES = 64 << 20
MAX_CONNECTIONS = 1024
PASSED_ON = ("authorization", "traceparent")
PASSED_BACK = ("content-type", "retry-after")
REST_S = 2.0
"""A server that could not be reached gets no requests for so long."""

log = structlog.get_logger()


class IfPrefillFails(StrEnum):
    """What becomes of a request that no prefill server could prefill."""

    DECODE = "decode"
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """The settings of one proxy; raises `ConfigError` for a wrong server."""

    prefill: Annotated[
        list[str], Option(metavar="URL", help="A prefill server, as http://host:8100; repeatable.")
    ]
    decode: Annotated[
        list[str], Option(metavar="URL", help="A decode server, as http://host:8200; repeatable.")
    ]
    host: Annotated[str, Option(help="The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="The port; 0 for a free one.")] = 8000
    timeout_s: Annotated[
        float, Option("--timeout", min=0.1, help="Seconds that a server may send nothing.")
    ] = 600.0
    if_prefill_fails: Annotated[
        IfPrefillFails,
        Option(help="A decode server computes the prompt itself, or the client gets the error."),
    ] = IfPrefillFails.DECODE
    overlap: Annotated[
        bool,
        Option(
            help="Send a request to both servers at once, so that KV moves while it is computed."
            " Not before a prefill server's first ticket, nor where the site signs tickets."
        ),
    ] = False

    def __post_init__(self) -> None:
        for role in ("prefill", "decode"):
            for url in getattr(self, role):
                _check_url(role, url)


def _check_url(role: str, url: str) -> None:
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    raise ConfigError(f"--{role} '{url}' is no address: give it as http://host:port")


@dataclass(eq=False)
class Server:
    """A server; of a prefill server ``ticket``, its latest, names the agent beside it."""

    role: str
    url: str
    rests_until_s: float = 0.0
    ticket: Ticket | None = None

    def __str__(self) -> str:
        return f"{self.role} server {self.url}"

    @property
    def rests(self) -> bool:
        """Whether it gets no requests now."""
        return time.monotonic() < self.rests_until_s


class Answered(LocalError):
    """The proxy answers the client itself, or with a prefill server's 4xx."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.headers = headers or {"content-type": "application/json"}
        error = {"message": message, "type": kind, "param": None, "code": status}
        self.status, self.body = status, body or json.dumps({"error": error}).encode()


class ServerFailed(Answered):
    """A server did not do its part; ``was_sent`` if it may have had the request."""

    was_sent = True


class Exchange:
    """One request of a client, and what is sent for it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.http, self.send, self.body = Request(scope, receive), send, dict[str, Any]()
        given = self.http.headers.get("x-request-id", "")
        self.request_id = given if 0 < len(given) <= 200 else uuid.uuid4().hex
        self.started_s = time.perf_counter()
        self.is_started = False
        self.record: dict[str, Any] = {"request_id": self.request_id, "handover": "none"}
        """What is logged at its end; times are seconds."""

    @property
    def so_far_s(self) -> float:
        """Seconds since the request came."""
        return round(time.perf_counter() - self.started_s, 6)

    async def read(self) -> None:
        """Read the body; raises `Answered` for one that is no request."""
        text = bytearray()
        async for chunk in self.http.stream():
            text += chunk
            if len(text) > MAX_BODY_BYTES:
                raise Answered(413, "too_large", f"the body has more than {MAX_BODY_BYTES} bytes")
        try:
            self.body = json.loads(bytes(text))
            self.body.pop(PARAMS, None)  # what a client says there is not trusted
        except (ValueError, RecursionError, AttributeError, TypeError) as error:
            raise Answered(400, "malformed", f"the body is not a JSON object: {error}") from error

    def why_alone(self) -> str | None:
        """Why a decode server computes this prompt itself: a ticket is of one sequence."""
        prompts = [self.body.get(key) for key in ("prompt", "prompt_embeds")]
        if any(isinstance(n := self.body.get(key), int) and n > 1 for key in ("n", "best_of")):
            return "several_sequences"
        if self.body.get("use_beam_search"):
            return "beam_search"
        if sum(_num_prompts(prompt) for prompt in prompts) > 1:
            return "several_prompts"
        if self.body.get("echo") or self.body.get("prompt_logprobs") is not None:
            return "prompt_asked_back"
        return None

    def for_prefill(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """What has a server compute the prompt, make one token, and end."""
        left_out = ("stream_options", "min_tokens")
        made = {key: value for key, value in self.body.items() if key not in left_out}
        if "max_completion_tokens" in made:
            made["max_completion_tokens"] = 1
        trace = known_trace(self.http.headers.get("traceparent", ""))
        traced = {"traceparent": trace} if trace else {}
        return {**made, "max_tokens": 1, "stream": False, PARAMS: {**params, **traced}}

    async def start(self, status: int, headers: Mapping[str, str | None]) -> None:
        """Send the head of the answer."""
        self.is_started, self.record["status"] = True, status
        ours = {f"x-kvbus-{role}": self.record.get(role) for role in ("prefill", "decode")}
        raw = {**headers, **ours, "x-request-id": self.request_id}.items()
        named = [(name.encode(), value.encode("latin-1")) for name, value in raw if value]
        await self.send({"type": "http.response.start", "status": status, "headers": named})

    async def send_body(self, chunk: bytes, *, ends: bool = False) -> None:
        """Send a part of the answer."""
        await self.send({"type": "http.response.body", "body": chunk, "more_body": not ends})

    async def refuse(self, error: Answered) -> None:
        """Answer with ``error``."""
        self.record["trouble"] = error.message
        await self.start(error.status, error.headers)
        await self.send_body(error.body, ends=True)


def _num_prompts(prompt: object) -> int:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return int(prompt is not None)


class Proxy:
    """One proxy: an ASGI application for the paths that generate; ``asgi`` has all paths.

    A prefill server that cannot be reached, breaks off, or answers anything but 200 or 4xx has
    failed, and the next in turn is asked; when all have, ``if_prefill_fails`` decides. A 4xx is the
    client's mistake, and the client's answer. A decode server that cannot be reached has not seen
    the ticket, so the next one gets it; any other end is the client's answer. When the client
    leaves, the connections to its servers are closed: vLLM then aborts.
    """

    def __init__(self, options: ProxyOptions) -> None:
        self._options, self._num_in_flight = options, 0
        self._prefill = [Server("prefill", url.rstrip("/")) for url in options.prefill]
        self._decode = [Server("decode", url.rstrip("/")) for url in options.decode]
        # vLLM closes an idle connection after 5 s; a request sent at that moment would be lost.
        limits = httpx.Limits(max_connections=2 * MAX_CONNECTIONS, keepalive_expiry=2.0)
        timeout = httpx.Timeout(options.timeout_s, connect=5.0, pool=None)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        generating = ("/v1/completions", "/v1/chat/completions")
        self.asgi = Starlette(
            routes=[
                *(Route(path, self, methods=["POST"]) for path in generating),
                Route("/v1/models", self._models),
                Route("/health", self._health),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self._client:
            yield

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
        well = {server.role for server in servers if seen[server.url] == "healthy"}
        told = {"ready": len(well) == 2, "in_flight": self._num_in_flight, **seen}
        return JSONResponse(told, 200 if len(well) == 2 else 503)

    async def _models(self, _: Request) -> Response:
        for server in _in_turn(self._decode):
            with contextlib.suppress(httpx.RequestError):
                answer = await self._client.get(f"{server.url}/v1/models", timeout=5.0)
                return Response(answer.content, answer.status_code, media_type="application/json")
        return JSONResponse({"error": "no decode server answers"}, 503)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, while its client stays."""
        exchange, outcome = Exchange(scope, receive, send), "stopped"
        self._num_in_flight += 1
        try:
            await exchange.read()
            async with anyio.create_task_group() as tasks:

                async def watch() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    tasks.cancel_scope.cancel()

                tasks.start_soon(watch)
                await self._serve(exchange)
                outcome = "answered"
                tasks.cancel_scope.cancel()
            if outcome == "stopped":
                outcome = "client_gone"
        except ClientDisconnect:
            outcome = "client_gone"
        except Answered as error:
            outcome = "answered"
            await exchange.refuse(error)
        finally:
            self._num_in_flight -= 1
            total_s = exchange.so_far_s
            log.info("request.ended", outcome=outcome, **exchange.record, total_s=total_s)

    async def _serve(self, exchange: Exchange) -> None:
        try:
            if reason := exchange.why_alone():
                exchange.record["handover"] = reason
                await self._decoded(exchange, {})
            elif not (self._options.overlap and await self._served_at_once(exchange)):
                await self._decoded(exchange, await self._prefilled(exchange))
        except Answered as error:
            if not exchange.is_started:
                await exchange.refuse(error)
            else:  # no end of the answer: so HTTP itself says that it is not whole
                exchange.record["trouble"] = error.message

    async def _prefilled(self, exchange: Exchange) -> Mapping[str, Any]:
        """The ticket under its key, or nothing to decode without one."""
        record = exchange.record
        record["handover"] = "no_prefill_server"
        failure = Answered(503, "no_prefill_server", "no prefill server can be reached")
        for server in _in_turn(self._prefill):
            try:
                ticket = await self._ticket(server, exchange)
            except ServerFailed as error:
                record["handover"], record["trouble"] = "prefill_failed", error.message
                failure = error
            else:
                record["handover"] = "handed_over" if ticket else "not_offered"
                return {PARAMS: ticket} if ticket else {}
        if self._options.if_prefill_fails is IfPrefillFails.REFUSE:
            raise failure
        return {}

    async def _served_at_once(self, exchange: Exchange) -> bool:
        """Ask both servers; False if the client has heard nothing: then all begins again."""
        server = next((one for one in self._prefill if not one.rests), None)
        if server is None or server.ticket is None:
            return False
        next(_in_turn(self._prefill))  # which is this server
        record, at, mistakes = exchange.record, server.ticket, list[Answered]()
        name = Rendezvous(
            uuid.uuid4().hex, at.endpoint, at.server_key, request_id=exchange.request_id
        )
        record["handover"] = "met"
        async with anyio.create_task_group() as tasks:

            async def prefill() -> None:
                try:
                    await self._ticket(server, exchange, transfer_id=name.transfer_id)
                except Answered as error:
                    record["trouble"] = error.message
                    if not exchange.is_started:
                        mistakes.extend([] if isinstance(error, ServerFailed) else [error])
                        tasks.cancel_scope.cancel()

            tasks.start_soon(prefill)
            named = {"do_remote_prefill": True, "do_remote_decode": False}
            try:
                await self._decoded(exchange, {PARAMS: {**named, "rendezvous": name.to_json()}})
            except Answered as error:
                mistakes.append(error)
            tasks.cancel_scope.cancel()
        if mistakes:
            raise mistakes[0]
        return exchange.is_started

    async def _ticket(self, server: Server, exchange: Exchange, **params: str) -> Any:
        """What ``server`` offers; raises `ServerFailed`, or `Answered` with its 4xx."""
        exchange.record["prefill"] = server.url
        body = exchange.for_prefill({"do_remote_decode": True, **params})
        async with self._asked(server, exchange, body) as answer:
            await answer.aread()
        exchange.record["prefill_s"] = exchange.so_far_s
        status, said = answer.status_code, f"{server} answered {answer.status_code}"
        if answer.is_client_error:
            exchange.record["handover"] = "refused"
            raise Answered(status, "refused", said, answer.content, _passed_back(answer))
        if answer.is_server_error:
            raise ServerFailed(status, "prefill_failed", said, answer.content)
        if status != httpx.codes.OK:
            raise ServerFailed(502, "prefill_failed", said)
        try:
            ticket = answer.json()[PARAMS]
        except KeyError:
            return None
        except (ValueError, RecursionError, TypeError) as error:
            said += " with what is no completion"
            raise ServerFailed(502, "prefill_failed", said) from error
        with contextlib.suppress(ProtocolError, AttributeError):  # not every one is of kvbus
            seen = Ticket.from_json(ticket.get("ticket"))
            server.ticket = None if seen.signature else seen  # the proxy has no key to sign with
        return ticket if isinstance(ticket, dict) else None

    async def _decoded(self, exchange: Exchange, params: Mapping[str, Any]) -> None:
        """Answer the client with a decode server's answer; raises `Answered`."""
        failure = Answered(503, "no_decode_server", "no decode server can be reached")
        for server in _in_turn(self._decode):
            exchange.record["decode"] = server.url
            try:
                async with self._asked(server, exchange, {**exchange.body, **params}) as answer:
                    await exchange.start(answer.status_code, _passed_back(answer))
                    async for chunk in answer.aiter_raw():
                        exchange.record.setdefault("first_token_s", exchange.so_far_s)
                        await exchange.send_body(chunk)
                await exchange.send_body(b"", ends=True)
                return
            except ServerFailed as error:
                failure = error
                if error.was_sent:
                    break
        raise failure

    @asynccontextmanager
    async def _asked(
        self, server: Server, exchange: Exchange, body: Mapping[str, Any]
    ) -> AsyncIterator[httpx.Response]:
        """The answer of ``server``, its body still to come; raises `ServerFailed`, in the block."""
        given = exchange.http.headers
        headers = {name: given[name] for name in PASSED_ON if name in given}
        headers |= {"x-request-id": exchange.request_id, "accept-encoding": "identity"}
        url = server.url + exchange.http.url.path
        try:
            async with self._client.stream("POST", url, headers=headers, json=body) as answer:
                yield answer
        except httpx.RequestError as error:
            why = f"{server} broke off: {str(error) or type(error).__name__}"
            if isinstance(error, httpx.ReadTimeout):
                why = f"{server} has sent nothing for {self._options.timeout_s:g} s (--timeout)"
            failed = ServerFailed(502, f"{server.role}_lost", why)
            if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
                failed.was_sent = False
                server.rests_until_s = time.monotonic() + REST_S
            raise failed from error


def _passed_back(answer: httpx.Response) -> Mapping[str, str]:
    return {name: value for name, value in answer.headers.items() if name in PASSED_BACK}


def _in_turn(pool: list[Server]) -> Iterator[Server]:
    """The servers that do not rest, each once, the one that waited longest first."""
    for server in list(pool):
        if not server.rests:
            pool.remove(server)
            pool.append(server)
            yield server


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@with_options(ProxyOptions)
def proxy(options: ProxyOptions) -> None:
    """Serve the OpenAI API with prefill and decode servers, for trying out disaggregated serving.

    Exit status 1: cannot listen on that address; 2: a mistake in an option.
    """
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((options.host, options.port), family=family)
    except (OSError, UnicodeError) as error:
        why = f"cannot listen on {options.host} port {options.port}: {error}"
        fail(why, status=1, cause=error)
    structlog.configure(
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    config = uvicorn.Config(
        Proxy(options).asgi,
        ws="none",
        log_level="warning",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=5,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again at its end
    host, port = listening.getsockname()[:2]
    log.info("proxy.started", url=f"http://{host}:{port}", pid=os.getpid())
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    app(prog_name="python -m kvbus.integrations.proxy")
