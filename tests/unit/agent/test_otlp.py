"""Ended handoffs are sent in the background, and kept or dropped while the collector is away.

`tests/process/handoffs/test_observed.py` shows that both agents send them.
"""

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import structlog

from kvbus.agent.otlp import SpanSender
from kvbus.errors import ConfigError
from kvbus.protocol import Span
from tests.support.agents import until
from tests.support.collector import Collector, collecting

pytestmark = pytest.mark.anyio

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALUES: dict[str, str | int | float] = {"zero": 0, "two bytes": 128, "large": 2**62 + 12_345}
VALUES |= {"half": 0.5, "long": "é" * 9000, "empty": ""}
SPANS = (
    Span("fetch", 1.0, 4.0, attributes=VALUES),
    Span("acquiring", 1.0, 2.0, 1),
    Span("reading", 2.0, 4.0, 1),
    Span("READ", 2.0, 3.5, 2, "transfer 0", "timeout: no answer"),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def said() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


@asynccontextmanager
async def sending_to(to: Collector | str) -> AsyncIterator[SpanSender]:
    sender = SpanSender(to if isinstance(to, str) else to.endpoint, {"service.name": "test"})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sender.run)
        yield sender
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def both() -> AsyncIterator[tuple[Collector, SpanSender]]:
    """A collector, and a sender to it."""
    with collecting() as collector:
        async with sending_to(collector) as sender:
            yield collector, sender


def put(sender: SpanSender, traceparent: str = "", offer_id: str = "o") -> None:
    sender.put(lambda: SPANS, offer_id, traceparent)


def num_taken(collector: Collector) -> int:
    return sum(span.name == "fetch" for span in collector.spans)


async def test_each_span_is_child_of_enclosing_span_with_its_values() -> None:
    async with both() as (collector, sender):
        put(sender, f"00-{TRACE}-{PARENT}-01")
        await until(lambda: num_taken(collector) == 1)
    by_name = {span.name: span for span in collector.spans}
    ids = {name: span.span_id for name, span in by_name.items()}
    assert {name: span.parent_id for name, span in by_name.items()} == {
        "fetch": PARENT,
        "acquiring": ids["fetch"],
        "reading": ids["fetch"],
        "READ": ids["reading"],
    }
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert len(set(ids.values())) == len(SPANS)
    fetch, read = by_name["fetch"], by_name["READ"]
    assert fetch.attributes == {f"kvbus.{name}": value for name, value in VALUES.items()}
    assert (read.attributes, read.error) == ({"kvbus.about": "transfer 0"}, "timeout: no answer")
    assert fetch.resource == {"service.name": "test"}
    assert fetch.end_ns - fetch.start_ns == 3_000_000_000


async def test_offer_gives_missing_trace_and_unsampled_one_is_not_sent() -> None:
    async with both() as (collector, sender):
        put(sender, "", offer_id=TRACE)
        put(sender, f"00-{PARENT}{PARENT}-{PARENT}-00")
        put(sender, "wrong", offer_id="of somebody else")
        put(sender, "", offer_id="of somebody else")
        await until(lambda: num_taken(collector) == 3)
    roots = [span for span in collector.spans if span.name == "fetch"]
    assert [root.parent_id for root in roots] == ["", "", ""]
    assert roots[0].trace_id == TRACE
    assert roots[1].trace_id == roots[2].trace_id != TRACE


async def test_short_collector_outage_is_logged_and_loses_no_spans(said: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with sending_to(f"http://127.0.0.1:{port}") as sender:
        put(sender)
        await until(lambda: said)
        put(sender)
        with collecting(port) as collector:
            await until(lambda: num_taken(collector) == 2)
    assert said[0]["event"] == "spans.unsent"
    assert "Connection refused" in said[0]["reason"]
    assert len(collector.spans) == 2 * len(SPANS)


async def test_refused_or_failing_spans_are_lost_alone_and_logged(said: list[Any]) -> None:
    def fails() -> list[Span]:
        raise ValueError

    async with both() as (collector, sender):
        sender.put(fails, "o")
        await until(lambda: len(said) == 1)
        collector.status = 401
        put(sender)
        await until(lambda: len(said) == 2)
        collector.status = 200
        put(sender)
        await until(lambda: num_taken(collector) == 1)
    assert [line["event"] for line in said] == ["spans.unsent", "spans.unsent"]
    assert said[0]["exc_info"][0] is ValueError
    assert "401" in said[1]["reason"]


async def test_what_cannot_fit_is_dropped(monkeypatch: pytest.MonkeyPatch, said: list[Any]) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "2")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    goes_on, waits = threading.Event(), threading.Event()

    def wait() -> tuple[Span, ...]:
        waits.set()
        goes_on.wait(60)
        return SPANS

    async with both() as (collector, sender):
        sender.put(wait, "o")
        await until(waits.is_set)
        for _ in range(5):
            put(sender)
        goes_on.set()
    assert num_taken(collector) == 3
    assert "Queue full" in said[0]["reason"]


async def test_spans_waiting_at_end_are_sent_with_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Basic%20abc, x-tenant = one")
    async with both() as (collector, sender):
        put(sender)
    (headers,) = collector.headers
    assert len(collector.spans) == len(SPANS)
    assert (headers["authorization"], headers["x-tenant"]) == ("Basic abc", "one")


async def test_unread_header_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, said: list[Any]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", 'x-key="secret"')
    async with both() as (collector, sender):
        put(sender)
    assert num_taken(collector) == 1
    assert "Header format invalid" in said[0]["reason"]
    assert not any("secret" in repr(line) for line in said)


@pytest.mark.parametrize("headers", ["x-key=sec%0Aret", "x key=secret", "x-key=secr%E2%82%ACet"])
@pytest.mark.parametrize("kind", ["", "TRACES_"])
async def test_unsendable_header_is_refused_at_start_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, kind: str, headers: str
) -> None:
    name = f"OTEL_EXPORTER_OTLP_{kind}HEADERS"
    monkeypatch.setenv(name, f"fine=yes,{headers}")
    with pytest.raises(ConfigError) as refused:
        SpanSender("http://127.0.0.1:4318", {})
    assert f"{name}: header 2" in refused.value.message
    assert "sec" not in repr(refused.value)


async def test_a_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch, said: list[Any]) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    with collecting() as collector, collecting() as elsewhere:
        collector.redirects_to = elsewhere.endpoint
        async with sending_to(collector) as sender:
            put(sender)
            await until(lambda: collector.headers)
    assert len(collector.headers) == 1
    assert elsewhere.headers == []
