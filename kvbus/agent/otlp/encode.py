"""Spans as the message that OTLP sends; the only import of opentelemetry."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from kvbus.agent.otlp.outbox import Ended
from kvbus.protocol.trace import Span, Value

SPAN_ID_BYTES, TRACE_ID_BYTES = 8, 16
NS_OF_S = 1_000_000_000
PREFIX = "kvbus."
"""Of the names of attributes."""
_INTERNAL = OtlpSpan.SPAN_KIND_INTERNAL


def encoded(resource: Mapping[str, str], clock_ns: int, ended: Sequence[Ended]) -> bytes:
    """The body of a request with all of ``ended``; their clock is so far behind that of 1970."""
    request = ExportTraceServiceRequest()
    of_process = request.resource_spans.add()
    _set_attributes(of_process.resource, resource)
    scope = of_process.scope_spans.add()
    scope.scope.name = "kvbus"
    for one in ended:
        _add_spans(scope.spans.add, one, clock_ns)
    body: bytes = request.SerializeToString()
    return body


def own_trace_id(name: str) -> bytes:
    """The trace of a request that came without one: both agents know the id of the offer.

    It is that id, which our agents draw from as many numbers, so that it can be found.
    """
    try:
        trace_id = bytes.fromhex(name)
    except ValueError:
        trace_id = b""
    if len(trace_id) == TRACE_ID_BYTES:
        return trace_id
    return hashlib.blake2b(name.encode(), digest_size=TRACE_ID_BYTES).digest()


def _add_spans(add: Any, ended: Ended, clock_ns: int) -> None:
    """Those of one offer or fetch, each a child of the one that it is a part of."""
    spans, parent = ended.make_spans(), ended.parent
    trace_id = bytes.fromhex(parent.trace_id) if parent else own_trace_id(ended.name)
    random = os.urandom(SPAN_ID_BYTES * len(spans))
    above = [bytes.fromhex(parent.span_id) if parent else b""]
    for number, span in enumerate(spans):
        span_id = random[SPAN_ID_BYTES * number : SPAN_ID_BYTES * (number + 1)]
        del above[span.depth + 1 :]
        end_s = span.start_s if span.end_s is None else span.end_s
        one = add(
            trace_id=trace_id,
            span_id=span_id,
            parent_span_id=above[-1],
            name=_text(span.name),
            kind=_INTERNAL,
            start_time_unix_nano=clock_ns + round(span.start_s * NS_OF_S),
            end_time_unix_nano=clock_ns + round(end_s * NS_OF_S),
        )
        above.append(span_id)
        if span.attributes or span.about or span.error:
            _say_more(one, span)


def _say_more(one: Any, span: Span) -> None:
    if span.attributes:
        _set_attributes(one, {PREFIX + name: value for name, value in span.attributes.items()})
    if span.about:
        _set_attributes(one, {f"{PREFIX}about": span.about})
    if span.error:
        one.status.code, one.status.message = Status.STATUS_CODE_ERROR, _text(span.error)


def _set_attributes(owner: Any, values: Mapping[str, Value]) -> None:
    """Of a span or a resource."""
    add = owner.attributes.add
    for name, value in values.items():
        one = add(key=name).value
        if isinstance(value, str):
            one.string_value = _text(value)
        elif isinstance(value, int):
            one.int_value = value
        else:
            one.double_value = value


def _text(text: str) -> str:
    """Half a character, which JSON can escape, is no reason to lose the rest."""
    return text if text.isascii() else text.encode(errors="replace").decode()
