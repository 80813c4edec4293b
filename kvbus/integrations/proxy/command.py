"""The proxy's command: its options, its socket, its logs, its exit status.

Refuses wrong options with one line and exit status 2, an address that it cannot listen on with 1.
"""

import contextlib
import os
import signal
import socket
import sys
from typing import NoReturn

import structlog
import typer
import uvicorn

from kvbus.errors import ConfigError, KVBusError, LocalError
from kvbus.integrations.proxy import arguments as args
from kvbus.integrations.proxy.app import Proxy
from kvbus.integrations.proxy.options import IfPrefillFails, ProxyOptions

log = structlog.get_logger()

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def proxy(
    *,
    prefill: args.Prefill,
    decode: args.Decode,
    host: args.Host = "127.0.0.1",
    port: args.Port = 8000,
    health_interval: args.HealthInterval = 2.0,
    max_in_flight: args.MaxInFlight = 1024,
    if_prefill_fails: args.OnFailedPrefill = IfPrefillFails.DECODE,
    grace: args.Grace = 5,
    log_format: args.LogLines = args.LogFormat.AUTO,
) -> None:
    """Serve the OpenAI API with prefill and decode servers, for trying out disaggregated serving.

    Each request of `/v1/completions` and `/v1/chat/completions` goes to a prefill server for one
    token, with `{"do_remote_decode": true}` as its `kv_transfer_params`. Those of the answer go
    with the request to a decode server, whose answer is the client's, streamed or whole.

    `GET /health` is 200 while a prefill and a decode server are healthy. `GET /metrics` is for
    Prometheus. `GET /v1/models` is a decode server's.

    Exit status 1: cannot listen on that address; 2: a mistake in an option.
    """
    try:
        options = ProxyOptions(
            prefill=tuple(prefill),
            decode=tuple(decode),
            health_interval_s=health_interval,
            max_in_flight=max_in_flight,
            if_prefill_fails=if_prefill_fails,
        )
        listening = _listen(host, port)
    except KVBusError as error:
        _fail(error)
    _log_to_stderr(log_format)
    _serve(options, listening, grace_s=grace)


def _serve(options: ProxyOptions, listening: socket.socket, *, grace_s: int) -> None:
    server = uvicorn.Server(
        uvicorn.Config(
            Proxy(options).asgi,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="critical",  # this process has its own log lines
            access_log=False,
            timeout_graceful_shutdown=grace_s,
        )
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again at its end
    host, port = listening.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    log.info("proxy.started", url=f"http://{name}:{port}", pid=os.getpid())
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
    finally:
        log.info("proxy.ended")


def _listen(host: str, port: int) -> socket.socket:
    """Raises `LocalError` when the address is taken, or is not of this machine."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise LocalError(f"cannot listen on {host} port {port}: {error}", port=port) from error


def _log_to_stderr(style: args.LogFormat) -> None:
    pretty = style is args.LogFormat.CONSOLE or (
        style is args.LogFormat.AUTO and sys.stderr.isatty()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if pretty else [structlog.processors.format_exc_info]),
            structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _fail(error: KVBusError) -> NoReturn:
    sys.stderr.write(f"error: {error.message}\n")
    raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
