"""The HTTP port of an agent: threads of its own, so that it answers for an event loop that hangs.

Each connection has one request, whole within a few seconds, and a thread. Only those with the token
are answered, or, where there is no token, this machine. A page of a foreign site can have the
browser of this machine ask there, under a name of its own: so the request must name the port by its
address.
"""

import base64
import hmac
import io
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import anyio
import structlog

from kvbus.agent.config import AgentConfig, http_address
from kvbus.agent.data_plane import is_loopback
from kvbus.errors import ConfigError, ErrorCode, KVBusError
from kvbus.keys.files import read_private

log = structlog.get_logger()

MAX_CONNECTIONS, MAX_HEAD_BYTES, HEAD_WITHIN_S = 64, 16 << 10, 5.0
MIN_TOKEN, MAX_TOKEN = 16, 1024
ALWAYS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
}
_HOST = re.compile(r"(localhost|[0-9.]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]+)?")

Query = Mapping[str, str]
"""The last value of each name."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One response."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    asks_for_token: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """What answers at a path; an open one asks for no token.

    ``reply`` is called in a thread of the server with the query and the Accept header.
    """

    reply: Callable[[Query, str], Answer]
    is_open: bool = False


def as_text(text: str, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    """One line, or some."""
    return Answer(f"{text}\n".encode(), status=status)


@dataclass(frozen=True, slots=True)
class Door:
    """Checks one request after the other; ``token`` is empty when there is none."""

    token: str = ""
    only_by_address: bool = False

    @classmethod
    def open(cls, config: AgentConfig) -> "Door":
        """What the config says; raises `ConfigError`, also for what would be open to a network."""
        if not config.http_bind:
            return cls()
        if config.http_token_file:
            return cls(_read_token(Path(config.http_token_file)))
        local = is_loopback(http_address(config.http_bind)[0])
        if not local and not config.insecure:
            raise ConfigError(
                f"key 'http_token_file': needed, because http_bind = \"{config.http_bind}\" is not "
                "loopback: other machines reach it. Write a token into a file of mode 0600, such "
                "as by 'openssl rand -hex 32', or write insecure = true",
                key="http_token_file",
            )
        return cls(only_by_address=local)

    def refusal(self, headers: Message) -> Answer | None:
        """Why the request is not answered; None when it is."""
        shown = _shown(headers.get("Authorization", ""))
        if self.token and not hmac.compare_digest(shown.encode(), self.token.encode()):
            return Answer(
                b"this port asks for its token (http_token_file): as 'Authorization: Bearer TOKEN',"
                b" or as the password of any user\n",
                status=HTTPStatus.UNAUTHORIZED,
                asks_for_token=True,
            )
        host = _HOST.fullmatch(headers.get("Host", ""))
        if self.only_by_address and (host is None or not is_loopback(host[1])):
            return as_text(
                "ask by the address of this machine, such as 127.0.0.1, or localhost: other names "
                "need a token (http_token_file)",
                HTTPStatus.FORBIDDEN,
            )
        return None


class HttpPort:
    """The port at ``http_bind``, none when that is empty."""

    def __init__(self, config: AgentConfig, routes: Mapping[str, Route]) -> None:
        """Raises `ConfigError` when strangers could ask there."""
        self._bind, self._routes, self._door = config.http_bind, routes, Door.open(config)
        self._server: _Server | None = None

    @property
    def number(self) -> int | None:
        """The port that is served, or will be; None while it is not known."""
        if self._server is not None:
            return int(self._server.server_address[1])
        return (http_address(self._bind)[1] or None) if self._bind else None

    def serve(self) -> None:
        """Raises `ConfigError` when the address cannot be bound."""
        if not self._bind:
            return
        try:
            self._server = _Server(self._bind, self._routes, self._door)
        except OSError as error:
            reason = error.strerror or str(error)
            message = f"key 'http_bind': cannot bind {self._bind}: {reason}"
            raise ConfigError(message, key="http_bind") from error
        threading.Thread(target=self._server.serve_forever, name="http", daemon=True).start()

    async def stop(self) -> None:
        """Free the address; requests that were read are answered."""
        server, self._server = self._server, None
        if server is not None:
            await anyio.to_thread.run_sync(server.shutdown)
            server.server_close()


class _Server(ThreadingTCPServer):
    """A thread for each connection, and never many: the oldest without a request makes room."""

    allow_reuse_address, daemon_threads, block_on_close = True, True, False
    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(self, bind: str, routes: Mapping[str, Route], door: Door) -> None:
        self.routes, self.door = routes, door
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, None] = {}
        self._num_open = 0
        self.address_family, _, _, _, address = socket.getaddrinfo(*http_address(bind))[0]
        super().__init__((str(address[0]), int(address[1])), _Request)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_full = self._num_open >= MAX_CONNECTIONS
            if is_full and self._waiting:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                _hang_up(oldest)
                is_full = False
            self._num_open += 1
            self._waiting[request] = None
        if is_full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.has_asked(request)
        with self._lock:
            self._num_open -= 1
        super().shutdown_request(request)

    def has_asked(self, request: Any) -> None:
        """Its request is whole: it keeps its connection."""
        with self._lock:
            self._waiting.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("http.connection_failed", exc_info=True)


class _Request(BaseHTTPRequestHandler):
    """The one request of a connection."""

    server: _Server
    timeout = HEAD_WITHIN_S
    server_version, sys_version = "kvbus", ""
    error_message_format, error_content_type = "%(code)d %(message)s\n", "text/plain"

    def handle(self) -> None:
        self.requestline, self.request_version, self.command = "", "HTTP/1.0", "GET"
        head = self._read_head()
        self.server.has_asked(self.request)
        if len(head) > MAX_HEAD_BYTES:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif head:
            self.rfile = io.BytesIO(head)
            self.raw_requestline = self.rfile.readline()
            if self.parse_request():
                self._send(self._answer())

    def end_headers(self) -> None:
        for name, value in ALWAYS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing: a probe comes every second."""

    def _read_head(self) -> bytes:
        """All up to the empty line; nothing when it comes too slowly.

        Of one that is too long four times the bound is read: a connection that is closed with bytes
        unread is reset, and then the client does not see its answer.
        """
        until, head = time.monotonic() + HEAD_WITHIN_S, b""
        while b"\r\n\r\n" not in head and len(head) <= 4 * MAX_HEAD_BYTES:
            more = self.request.recv(4096)
            if not more or time.monotonic() >= until:
                return b""
            head += more
        return head

    def _answer(self) -> Answer:
        if self.command not in ("GET", "HEAD"):
            status = HTTPStatus.METHOD_NOT_ALLOWED
            return as_text("only GET and HEAD are answered here", status)
        url, routes = urlsplit(self.path), self.server.routes
        route = routes.get(url.path)
        if route is None or not route.is_open:
            refusal = self.server.door.refusal(self.headers)
            if refusal is not None:
                return refusal
        if route is None:
            return as_text(f"there is {', '.join(sorted(routes))}", HTTPStatus.NOT_FOUND)
        try:
            return route.reply(dict(parse_qsl(url.query)), self.headers.get("Accept", ""))
        except KVBusError as error:
            is_wrong = error.code is ErrorCode.INVALID
            status = HTTPStatus.BAD_REQUEST if is_wrong else HTTPStatus.SERVICE_UNAVAILABLE
            return as_text(f"{error.code}: {error.message}", status)
        except Exception:  # the answer says that it failed, the log why
            log.exception("http.failed", path=url.path)
            text = "failed; the agent's log says why"
            return as_text(text, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        if answer.asks_for_token:
            self.send_header("WWW-Authenticate", 'Basic realm="kvbus", charset="UTF-8"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)  # the thread that reads wakes up, and closes it


def _read_token(path: Path) -> str:
    try:
        token = read_private(path).decode(errors="replace").strip()
    except ConfigError as error:
        message = f"key 'http_token_file': {error.message}"
        raise ConfigError(message, key="http_token_file") from error
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"key 'http_token_file': {path} has no token: one line of {MIN_TOKEN} to {MAX_TOKEN} "
            "printable characters",
            key="http_token_file",
        )
    return token


def _shown(authorization: str) -> str:
    """The token that a request shows, as a bearer's or as a password."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except ValueError:  # not Base64, or not ASCII or UTF-8
        return ""
