"""The HTTP port of an agent.

Its own threads answer while the event loop hangs. A connection carries one request; one above the
limit closes the oldest. Without a token, the Host header must be a loopback address, against DNS
rebinding.
"""

import asyncio
import base64
import hmac
import io
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import msgspec
import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvbus.agent.config import http_address
from kvbus.agent.data_plane import is_loopback
from kvbus.agent.status import StatusReporter
from kvbus.errors import ConfigError, ErrorCode, KVBusError, LocalError, reason_of
from kvbus.protocol.tools import Cost, Status, Trace

log = structlog.get_logger()

MAX_CONNECTIONS, MAX_HEAD_BYTES, WHOLE_WITHIN_S, ANSWERS_WITHIN_S = 64, 16 << 10, 5.0, 2.0
OPEN = ("/healthz", "/readyz")
ALWAYS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
}
PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
PATHS = (*FILES, *OPEN, "/live", "/metrics", "/status", "/trace", "/cost")
_HOST = re.compile(r"(localhost|[0-9.]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]+)?")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


def _text(text: str, status: HTTPStatus = HTTPStatus.OK) -> Page:
    return Page(f"{text}\n".encode(), status=status)


def _json(value: object) -> Page:
    return Page(msgspec.json.encode(value) + b"\n", "application/json")


def _verdict(problems: list[str]) -> Page:
    if problems:
        return _text("\n".join(problems), HTTPStatus.SERVICE_UNAVAILABLE)
    return _text("ok")


def call_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T]) -> T:
    """Run ``function`` in the loop; raise `LocalError` (``timeout``) if the loop hangs."""

    answer: Future[T] = Future()

    def run() -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(function())
            except Exception as error:  # the caller handles it
                answer.set_exception(error)

    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError as error:  # it is closed
        raise LocalError("the agent has ended", code=ErrorCode.DRAINING) from error
    if not wait([answer], ANSWERS_WITHIN_S).done:
        answer.cancel()
        problem = f"the event loop has not answered within {ANSWERS_WITHIN_S:g} s"
        raise LocalError(problem, code=ErrorCode.TIMEOUT)
    return answer.result()


class AgentPages:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        registry: CollectorRegistry,
        report: StatusReporter,
    ) -> None:
        self._loop, self._registry, self._report = loop, registry, report

    def answer(self, path: str, query: Mapping[str, str], accept: str = "") -> Page:
        try:
            if path in FILES:
                name, content_type = FILES[path]
                return Page((PAGE / name).read_bytes(), content_type)
            if path == "/healthz":
                return self._healthz()
            if path == "/live":
                return self._live_page(query.get("recent", ""))
            if path in PATHS:
                return call_loop(self._loop, lambda: self._page(path, query, accept))
            return _text(f"there is {', '.join(sorted(PATHS))}", HTTPStatus.NOT_FOUND)
        except KVBusError as error:
            is_wrong = error.code is ErrorCode.INVALID
            text = f"{error.code}: {error.message}"
            status = HTTPStatus.BAD_REQUEST if is_wrong else HTTPStatus.SERVICE_UNAVAILABLE
        except Exception:  # the response reports the failure, the log its cause
            log.exception("http.failed", path=path)
            text, status = "failed; the log has the reason", HTTPStatus.INTERNAL_SERVER_ERROR
        return _text(text, status)

    def _page(self, path: str, query: Mapping[str, str], accept: str) -> Page:
        report, name = self._report, query.get("id", "")
        if path == "/readyz":  # these faults end without a restart of this agent
            return _verdict([fault.what for fault in report.unready()])
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            return Page(encode(self._registry), content_type)
        if path == "/status":
            fetch_id, offer_id = query.get("fetch", ""), query.get("offer", "")
            return _json(report.status(Status(fetch_id=fetch_id, offer_id=offer_id)))
        if path == "/trace":
            return _json(report.trace(Trace(request_id=name, offer_id=name, fetch_id=name)))
        try:
            return _json(report.service.cost(msgspec.convert(query, Cost, strict=False)))
        except msgspec.ValidationError as error:
            raise LocalError(f"{path}: {reason_of(error)}", code=ErrorCode.INVALID) from error

    def _healthz(self) -> Page:
        """Fail if the event loop hangs, as only a restart repairs that."""
        try:
            call_loop(self._loop, lambda: None)
        except KVBusError as error:
            return _verdict([error.message])
        return _verdict([])

    def _live_page(self, wanted: str) -> Page:
        number = int(wanted) if wanted.isascii() and wanted.isdigit() and len(wanted) < 9 else 0
        live = call_loop(self._loop, self._report.live).result()
        return _json(msgspec.structs.replace(live, recent=live.recent[:number]))


class HttpServer(ThreadingTCPServer):
    allow_reuse_address, daemon_threads = True, True
    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(self, bind: str, pages: AgentPages, token: str) -> None:
        self.pages, self.token = pages, token
        self.is_local = is_loopback(http_address(bind)[0])
        self._lock, self._open = threading.Lock(), dict[Any, None]()
        self.address_family, _, _, _, address = socket.getaddrinfo(*http_address(bind))[0]
        try:
            super().__init__((str(address[0]), int(address[1])), _Request)
        except OSError as error:
            raise ConfigError(f"cannot bind {bind}: {error.strerror or error}") from error
        threading.Thread(target=self.serve_forever, name="http", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # it has already closed
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("http.connection_failed", exc_info=True)


class _Request(BaseHTTPRequestHandler):
    server: HttpServer
    timeout = WHOLE_WITHIN_S
    server_version, sys_version = "kvbus", ""
    error_message_format, error_content_type = "%(code)d %(message)s\n", "text/plain"

    def handle(self) -> None:
        """Read more than `MAX_HEAD_BYTES`: closing with unread bytes would reset the connection."""
        head, more, until = b"", b" ", time.monotonic() + WHOLE_WITHIN_S
        while b"\r\n\r\n" not in head and len(head) <= 4 * MAX_HEAD_BYTES and more:
            self.request.settimeout(max(0.001, until - time.monotonic()))
            head += (more := self.request.recv(4096))
        self.request.settimeout(self.timeout)
        self.rfile = io.BytesIO(head)
        self.requestline, self.request_version, self.command = "", "HTTP/1.0", "GET"
        if len(head) > MAX_HEAD_BYTES:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            self.handle_one_request()

    def do_GET(self) -> None:  # http.server looks up this name
        url = urlsplit(self.path)
        answer = None if url.path in OPEN else self._refusal()
        if answer is None:
            query, accept = dict(parse_qsl(url.query)), self.headers.get("Accept", "")
            answer = self.server.pages.answer(url.path, query, accept)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        if answer.status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Basic realm="kvbus", charset="UTF-8"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET  # noqa: N815 - as above

    def end_headers(self) -> None:
        for name, value in ALWAYS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing: probes come every second."""

    def _refusal(self) -> Page | None:
        token = self.server.token
        if token and not hmac.compare_digest(self._shown_token().encode(), token.encode()):
            return _text(
                "this port requires its token (http_token_file): as 'Authorization: Bearer TOKEN', "
                "or as the password of any user",
                HTTPStatus.UNAUTHORIZED,
            )
        host = _HOST.fullmatch(self.headers.get("Host", ""))
        if not token and self.server.is_local and (host is None or not is_loopback(host[1])):
            return _text(
                "use the address of this machine, such as 127.0.0.1, or localhost: other names "
                "need a token (http_token_file)",
                HTTPStatus.FORBIDDEN,
            )
        return None

    def _shown_token(self) -> str:
        scheme, _, value = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "basic":
            return value.strip() if scheme.lower() == "bearer" else ""
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:  # not Base64, or not ASCII or UTF-8
            return ""
