"""The proxy's command: its socket, its logs, its exit status."""

import contextlib
import os
import signal
import socket
import sys

import structlog
import typer
import uvicorn

from kvbus.integrations.proxy.app import Proxy
from kvbus.integrations.proxy.options import LogFormat, ProxyOptions
from kvbus.options import with_options
from kvbus.output import fail
from kvbus.text import printable_values

log = structlog.get_logger()

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
@with_options(ProxyOptions)
def proxy(options: ProxyOptions) -> None:
    """Serve the OpenAI API with prefill and decode servers, for trying out disaggregated serving.

    Each request of `/v1/completions` and `/v1/chat/completions` goes to a prefill server for one
    token, with `{"do_remote_decode": true}` as its `kv_transfer_params`. Those of the answer go
    with the request to a decode server, whose answer is the client's, streamed or whole.

    `GET /health` is 200 while a prefill and a decode server are healthy. `GET /metrics` is for
    Prometheus. `GET /v1/models` is a decode server's.

    Exit status 1: cannot listen on that address; 2: a mistake in an option.
    """
    listening = _listen(options.host, options.port)
    _log_to_stderr(options.log_format)
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
            timeout_graceful_shutdown=options.grace_s,
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
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        fail(f"cannot listen on {host} port {port}: {error}", status=1, cause=error)


def _log_to_stderr(style: LogFormat) -> None:
    is_auto = style is LogFormat.AUTO
    pretty = style is LogFormat.CONSOLE or (is_auto and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if pretty else [structlog.processors.format_exc_info]),
            *(
                (printable_values, structlog.dev.ConsoleRenderer())
                if pretty
                else (structlog.processors.JSONRenderer(),)
            ),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
