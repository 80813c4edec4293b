"""An HTTP server in threads of its own, so that it answers for an event loop that hangs."""

import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from threading import Thread
from typing import Any
from urllib.parse import parse_qsl

import structlog
from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.server import create_server

from kvbus.agent.http.answer import Answer, Route, as_text
from kvbus.agent.http.door import Door
from kvbus.agent.process.addresses import http_address
from kvbus.errors import ConfigError, ErrorCode, KVBusError

log = structlog.get_logger()

NUM_THREADS, MAX_CONNECTIONS = 4, 64
IDLE_S, LOOK_S = 5, 1
LIMITS: dict[str, Any] = {
    "threads": NUM_THREADS,
    "connection_limit": 2 * MAX_CONNECTIONS,  # so many would keep probes out: see _Connection
    "channel_timeout": IDLE_S,
    "cleanup_interval": LOOK_S,
    "asyncore_loop_timeout": LOOK_S,
    "max_request_header_size": 16 << 10,
    "max_request_body_size": 1 << 10,
    "ident": "kvbus",
    "clear_untrusted_proxy_headers": True,
}
ALWAYS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", "default-src 'self'; img-src data:; frame-ancestors 'none'"),
)

Start = Callable[[str, list[tuple[str, str]]], object]


# waitress takes no more connections once it has many, until one of them has said nothing for a
# while. So some that send a byte now and then would keep the probes out, and the agent is killed.
class _Connection(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    """Where there are too many, the oldest one without a whole request makes room."""

    def __init__(self, server: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(server, *arguments, **named)
        there = server.active_channels.values()
        if len(there) > MAX_CONNECTIONS:
            waiting = (one for one in there if not one.requests)
            min(waiting, key=lambda one: one.creation_time).handle_close()


class HttpServer:
    """Serves from when it is made until `stop`."""

    def __init__(self, bind: str, routes: Mapping[str, Route], door: Door) -> None:
        """Raises `ConfigError` when the address cannot be bound."""
        self._routes, self._door = routes, door
        # It warns of each request that waits for a thread, as text between the agent's lines.
        logging.getLogger("waitress").setLevel(logging.CRITICAL)
        self._sockets: dict[int, Any] = {}
        self._is_stopped = False
        self._server = create_server(
            self._answer, map=self._sockets, sockets=[_bound(bind)], **LIMITS
        )
        self._server.channel_class = _Connection
        self.port: int = self._server.socket.getsockname()[1]
        self._thread = Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Free the address, at once; a request that is being answered ends for itself."""
        self._is_stopped = True
        self._server.pull_trigger()
        self._thread.join()
        wasyncore.close_all(self._sockets)
        self._server.task_dispatcher.shutdown(timeout=1)

    def _run(self) -> None:
        """The loop of waitress; what wakes it must not be closed before `stop` has used it."""
        while not self._is_stopped:
            wasyncore.loop(LOOK_S, use_poll=True, map=self._sockets, count=1)

    def _answer(self, environ: Mapping[str, Any], start: Start) -> Iterable[bytes]:
        answer = self._reply(environ)
        headers = [("Content-Type", answer.content_type), *ALWAYS, *answer.headers]
        start(answer.status, [("Content-Length", str(len(answer.body))), *headers])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [answer.body]

    def _reply(self, environ: Mapping[str, Any]) -> Answer:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return as_text("only GET and HEAD are answered here", "405 Method Not Allowed")
        path = environ["PATH_INFO"]
        route = self._routes.get(path)
        if route is None or not route.is_open:
            refusal = self._door.refusal(environ)
            if refusal is not None:
                return refusal
        if route is None:
            return as_text(f"there is {', '.join(sorted(self._routes))}", "404 Not Found")
        query = dict(parse_qsl(environ["QUERY_STRING"]))
        try:
            return route.reply(query, environ.get("HTTP_ACCEPT", ""))
        except KVBusError as error:
            is_wrong = error.code is ErrorCode.INVALID
            status = "400 Bad Request" if is_wrong else "503 Service Unavailable"
            return as_text(f"{error.code}: {error.message}", status)
        except Exception:  # the answer says that it failed, the log why
            log.exception("http.failed", path=path)
            return as_text("failed; the agent's log says why", "500 Internal Server Error")


def _bound(bind: str) -> socket.socket:
    host, port = http_address(bind)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise _unbound(bind, error) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()
    except OSError as error:
        sock.close()
        raise _unbound(bind, error) from error
    return sock


def _unbound(bind: str, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    return ConfigError(f"key 'http_bind': cannot bind {bind}: {reason}", key="http_bind")
