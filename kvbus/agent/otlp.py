"""Sends spans of what has ended by OpenTelemetry's SDK; imported only if a collector is named.

The SDK's batch processor has the queue, the thread and the repeats. One item of its queue is one
offer or fetch: the spans of it are made in that thread, because the event loop has other work.
"""

import hashlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast
from urllib.parse import unquote

import anyio
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from kvbus.errors import ConfigError
from kvbus.protocol.trace import Span, TraceParent, known_trace

log = structlog.get_logger()

MAX_WAITING, MAX_BATCH, PERIOD_S, ENDS_WITHIN_S = 2048, 256, 1.0, 2.0
READINGS = {
    "otlp_handoffs": "Offers or fetches whose spans the collector has taken.",
    "otlp_dropped": "Offers or fetches whose spans the collector did not take in time.",
}
HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+=[\t\x20-\x7e\xa0-\xff]*")
_SCOPE, _SAMPLED = InstrumentationScope("kvbus"), TraceFlags(TraceFlags.SAMPLED)

MakeSpans = Callable[[], Sequence[Span]]
InLoop = Callable[[Callable[[], None]], object]
"""Has a function called in the event loop: logs are written there."""


class SpanSender:
    """Takes what has ended, and sends its spans to the collector at ``endpoint``."""

    def __init__(self, endpoint: str, resource: Mapping[str, str], in_loop: InLoop) -> None:
        """Raises `ConfigError` when a header of the environment cannot be sent."""
        _check_headers()
        self._exporter = _Exporter(f"{endpoint.rstrip('/')}/v1/traces", Resource(resource))
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_WAITING,
            max_export_batch_size=MAX_BATCH,
            schedule_delay_millis=1000 * PERIOD_S,
        )
        self._num_put = self._num_full = 0
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [_Logged(in_loop)], False

    def put(self, make_spans: MakeSpans, name: str, *traceparents: str) -> None:
        """Something has ended: of the first trace that is one, if that is sampled.

        Without a trace it is one that ``name`` gives: the offer's id, or the fetch's where no offer
        was met.
        """
        parent = TraceParent.read(known_trace(*traceparents))
        if parent is not None and not parent.sampled:
            return
        if self._num_put - self._exporter.num_sent - self._exporter.num_lost >= MAX_WAITING:
            self._num_full += 1
            return
        self._num_put += 1
        self._processor.on_end(_Ended(make_spans, parent, name))

    def readings(self) -> dict[str, float]:
        """The readings named in `READINGS`."""
        num_dropped = self._exporter.num_lost + self._num_full
        return {"otlp_handoffs": self._exporter.num_sent, "otlp_dropped": num_dropped}

    async def run(self) -> None:
        """Return when cancelled; what is left is sent, if that is quick."""
        try:
            await anyio.sleep_forever()
        finally:
            ending = threading.Thread(target=self._processor.shutdown, daemon=True)
            ending.start()
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(ending.join, ENDS_WITHIN_S)


class _Ended(ReadableSpan):
    """One offer or fetch, in the queue of the batch processor."""

    def __init__(self, make_spans: MakeSpans, parent: TraceParent | None, name: str) -> None:
        trace_id = int(parent.trace_id, 16) if parent else own_trace_id(name)
        self.root = _context(trace_id, int(parent.span_id, 16) if parent else 0)
        self.make_spans = make_spans
        super().__init__(name, context=self.root)


class _Exporter(OTLPSpanExporter):
    """The SDK's, of handoffs; its thread is the one that calls it."""

    def __init__(self, url: str, resource: Resource) -> None:
        super().__init__(url)
        self._resource = resource
        self.num_sent = self.num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        made: list[ReadableSpan] = []
        num_made = 0
        for ended in spans:
            try:
                made += _spans(cast("_Ended", ended), self._resource)
                num_made += 1
            except Exception:  # these are lost, the next are not
                logging.getLogger("opentelemetry").exception("the spans of a handoff")
        is_taken = super().export(made) is SpanExportResult.SUCCESS
        self.num_sent += num_made if is_taken else 0
        self.num_lost += len(spans) - (num_made if is_taken else 0)
        return SpanExportResult.SUCCESS if is_taken else SpanExportResult.FAILURE


class _Logged(logging.Handler):
    """Lines of the SDK, in the agent's log."""

    def __init__(self, in_loop: InLoop) -> None:
        super().__init__(logging.WARNING)
        self._in_loop = in_loop

    def emit(self, record: logging.LogRecord) -> None:
        say = partial(log.warning, "spans.unsent", reason=record.getMessage())
        if record.exc_info:
            say = partial(log.error, "spans.failed", exc_info=record.exc_info[1])
        self._in_loop(say)


def own_trace_id(name: str) -> int:
    """The trace of a request that came without one: both agents know the id of the offer.

    It is that id, where that has as many digits, so that it can be found.
    """
    if re.fullmatch("[0-9a-f]{32}", name) and int(name, 16):
        return int(name, 16)
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big")


def _spans(ended: _Ended, resource: Resource) -> Iterator[ReadableSpan]:
    """Those of one offer or fetch, each a child of the one that it is a part of."""
    clock_ns = time.time_ns() - time.monotonic_ns()
    above = [ended.root if ended.root.span_id else None]
    for span in ended.make_spans():
        del above[span.depth + 1 :]
        said = {**span.attributes, "about": span.about} if span.about else span.attributes
        end_s = span.start_s if span.end_s is None else span.end_s
        context = _context(ended.root.trace_id, random.getrandbits(64) or 1)
        yield ReadableSpan(
            name=_text(span.name),
            context=context,
            parent=above[-1],
            resource=resource,
            attributes={
                f"kvbus.{name}": _text(value) if isinstance(value, str) else value
                for name, value in said.items()
            },
            status=Status(StatusCode.ERROR, _text(span.error)) if span.error else Status(),
            start_time=clock_ns + round(span.start_s * 1e9),
            end_time=clock_ns + round(end_s * 1e9),
            instrumentation_scope=_SCOPE,
        )
        above.append(context)


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)


def _text(text: str) -> str:
    """Half a character, which JSON can escape, is no reason to lose the rest."""
    return text.encode(errors="replace").decode()


def _check_headers() -> None:
    """KEY=VALUE,KEY=VALUE, with percent escapes in the values; these are secrets, and not told."""
    for variable in HEADERS:
        given = [one for one in os.environ.get(variable, "").split(",") if "=" in one]
        for number, one in enumerate(given, 1):
            key, _, value = one.partition("=")
            if not _HEADER.fullmatch(f"{key.strip()}={unquote(value.strip())}"):
                raise ConfigError(
                    f"the environment's {variable}: header {number} cannot be sent: its name or "
                    "its value has characters that HTTP does not allow there",
                    key="otlp_endpoint",
                )
