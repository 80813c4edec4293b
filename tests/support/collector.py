"""A minimal OpenTelemetry collector on a real socket."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class CollectedSpan:
    """One span, and the resource of its process."""

    resource: dict[str, Any]
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str


@dataclass
class Collector:
    """Spans and headers of requests; the reply is ``status``, or a redirect."""

    port: int = 0
    status: int = 200
    redirects_to: str = ""
    spans: list[CollectedSpan] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def of(self, service: str) -> list[CollectedSpan]:
        return [one for one in self.spans if one.resource["service.name"] == service]

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        self.headers.append(headers)
        if path != "/v1/traces" or headers.get("content-type") != "application/x-protobuf":
            return 404
        if self.status == 200:
            request = ExportTraceServiceRequest.FromString(body)
            self.spans += _spans(request)
        return self.status


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that http.server looks for
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status = collector.take(self.path, headers, body)
            self.send_response(302 if collector.redirects_to else status)
            if collector.redirects_to:
                self.send_header("Location", collector.redirects_to)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST  # noqa: N815 - as above

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        collector.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _spans(request: Any) -> Iterator[CollectedSpan]:
    for of_process in request.resource_spans:
        resource = _attributes(of_process.resource.attributes)
        for scope in of_process.scope_spans:
            for one in scope.spans:
                yield CollectedSpan(
                    resource=resource,
                    name=one.name,
                    trace_id=one.trace_id.hex(),
                    span_id=one.span_id.hex(),
                    parent_id=one.parent_span_id.hex(),
                    start_ns=one.start_time_unix_nano,
                    end_ns=one.end_time_unix_nano,
                    attributes=_attributes(one.attributes),
                    error=one.status.message,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in pairs}
