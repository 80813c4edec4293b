"""An exporter of spans by OpenTelemetry's SDK, whose thread makes them, off the event loop."""

import logging
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from urllib.parse import unquote

import anyio
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from kvbus.errors import ConfigError
from kvbus.protocol.tools import Span, TraceParent, known_trace

log = structlog.get_logger()
ENDS_WITHIN_S = 2.0
HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+=[\t\x20-\x7e\xa0-\xff]*")


class SpanSender(OTLPSpanExporter):
    """Raises `ConfigError` for invalid headers in the environment, without their values."""

    def __init__(self, endpoint: str, resource: Mapping[str, str]) -> None:
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [_LogHandler(logging.WARNING)], False
        _check_headers()
        super().__init__(f"{endpoint.rstrip('/')}/v1/traces")
        self._processor, self._resource = BatchSpanProcessor(self), Resource(resource)

    def put(self, make_spans: Callable[[], Sequence[Span]], name: str, *traceparents: str) -> None:
        """Queue an ended offer or fetch, if the first valid trace parent is sampled.

        Without one, both agents derive the trace id from ``name``.
        """
        is_id = re.fullmatch("[0-9a-f]{32}", name)
        own = TraceParent(name if is_id else uuid.uuid5(uuid.NAMESPACE_OID, name).hex, "0", True)
        parent = TraceParent.read(known_trace(*traceparents)) or own
        if parent.sampled:
            root = _context(int(parent.trace_id, 16), int(parent.span_id, 16))
            ended = _Ended("", context=root, resource=self._resource)
            ended.make_spans = make_spans
            self._processor.on_end(ended)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        ended = (one for one in spans if isinstance(one, _Ended))
        return super().export([span for one in ended for span in one.spans()])

    async def run(self) -> None:
        """When cancelled, send the queue within `ENDS_WITHIN_S`."""
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.move_on_after(ENDS_WITHIN_S, shield=True):
                await anyio.to_thread.run_sync(self._processor.shutdown, abandon_on_cancel=True)


class _Ended(ReadableSpan):
    make_spans: Callable[[], Sequence[Span]]

    def spans(self) -> Iterator[ReadableSpan]:
        clock_ns = time.time_ns() - time.monotonic_ns()
        above = [self.context if self.context.span_id else None]
        for span in self.make_spans():
            del above[span.depth + 1 :]
            about = {"about": span.about} if span.about else {}
            end_s = span.start_s if span.end_s is None else span.end_s
            context = _context(self.context.trace_id, random.getrandbits(64) or 1)
            yield ReadableSpan(
                name=span.name,
                context=context,
                parent=above[-1],
                resource=self.resource,
                attributes={f"kvbus.{key}": one for key, one in (span.attributes | about).items()},
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=clock_ns + round(span.start_s * 1e9),
                end_time=clock_ns + round(end_s * 1e9),
            )
            above.append(context)


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(1))


def _check_headers() -> None:
    for variable in HEADERS:
        given = [one for one in os.environ.get(variable, "").split(",") if "=" in one]
        for number, one in enumerate(given, 1):
            key, _, value = one.partition("=")
            if not HEADER.fullmatch(f"{key.strip()}={unquote(value.strip())}"):
                raise ConfigError(
                    f"key 'otlp_endpoint': the environment's {variable}: header {number} cannot be "
                    "sent: HTTP does not allow its name or its value",
                    key="otlp_endpoint",
                )


class _LogHandler(logging.Handler):
    """Copies SDK lines to the agent's log, without values of invalid headers."""

    def emit(self, record: logging.LogRecord) -> None:
        is_secret = record.name == "opentelemetry.util.re"
        reason = record.msg if is_secret else record.getMessage()
        log.warning("spans.unsent", reason=reason, exc_info=record.exc_info)
