"""What has ended is sent in the background, and kept or dropped while the collector is away."""

import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import structlog

from kvbus.agent import HEADERS, SETTLE_S, Answer, Collector, SpanOutbox, SpanSender
from kvbus.errors import ConfigError
from kvbus.protocol import Span
from tests.agents import until
from tests.collector import collecting

pytestmark = pytest.mark.anyio

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
RESOURCE = {"service.name": "kvbus-test"}
SPANS = (
    Span("fetch", 1.0, 4.0, attributes={"num_bytes": 7, "path": "direct"}),
    Span("claiming", 1.0, 2.0, 1),
    Span("reading", 2.0, 4.0, 1),
    Span("READ", 2.0, 3.5, 2, "leg 0", "timeout: no answer"),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pauses are short."""
    monkeypatch.setattr("kvbus.agent.otlp.sender.PERIOD_S", 0.02)


@pytest.fixture
def said() -> Any:
    with structlog.testing.capture_logs() as lines:
        yield lines


@asynccontextmanager
async def sends(outbox: SpanOutbox, endpoint: str, **environment: str) -> AsyncIterator[None]:
    def at_once(call: Callable[[], None]) -> None:
        call()

    sender = SpanSender(outbox, Collector(endpoint, environment), RESOURCE, at_once)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sender.run)
        yield
        tasks.cancel_scope.cancel()


def put(outbox: SpanOutbox, traceparent: str = "", offer_id: str = "o") -> None:
    outbox.put(lambda: SPANS, offer_id, traceparent)


def events(said: list[Any]) -> list[str]:
    return [line["event"] for line in said]


async def test_each_span_is_a_child_of_the_one_that_it_is_a_part_of() -> None:
    outbox = SpanOutbox()
    with collecting() as collector:
        async with sends(outbox, collector.endpoint):
            put(outbox, f"00-{TRACE}-{PARENT}-01")
            await until(lambda: outbox.num_sent == 1)

    by_name = {span.name: span for span in collector.spans}
    ids = {name: span.span_id for name, span in by_name.items()}
    assert {name: span.parent_id for name, span in by_name.items()} == {
        "fetch": PARENT,
        "claiming": ids["fetch"],
        "reading": ids["fetch"],
        "READ": ids["reading"],
    }
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert len(set(ids.values())) == len(SPANS)
    assert by_name["fetch"].attributes == {"kvbus.num_bytes": 7, "kvbus.path": "direct"}
    assert by_name["READ"].attributes == {"kvbus.about": "leg 0"}
    assert by_name["READ"].error == "timeout: no answer"
    assert by_name["fetch"].resource == RESOURCE
    assert by_name["fetch"].end_ns - by_name["fetch"].start_ns == 3_000_000_000


async def test_values_of_any_kind_and_size_arrive_as_they_are() -> None:
    outbox = SpanOutbox()
    values: dict[str, str | int | float] = {
        "zero": 0,
        "small": 127,
        "two bytes": 128,
        "large": 2**62 + 12_345,
        "half": 0.5,
        "long": "é" * 9000,
        "empty": "",
    }
    with collecting() as collector:
        async with sends(outbox, collector.endpoint):
            outbox.put(lambda: [Span("fetch", 0.0, 1.0, attributes=values)], "o")
            outbox.put(lambda: [Span("fetch", 0.0, 1.0, 0, "\ud800", "\ud800")], "o")
            await until(lambda: outbox.num_sent == 2)

    whole, broken = collector.spans
    assert whole.attributes == {f"kvbus.{name}": value for name, value in values.items()}
    assert (broken.attributes["kvbus.about"], broken.error) == ("?", "?")


async def test_without_a_trace_both_agents_make_the_same_out_of_the_offer() -> None:
    outbox = SpanOutbox()
    with collecting() as collector:
        async with sends(outbox, collector.endpoint):
            put(outbox, "", offer_id=TRACE)
            put(outbox, "wrong", offer_id="of somebody else")
            put(outbox, "", offer_id="of somebody else")
            await until(lambda: outbox.num_sent == 3)

    roots = [span for span in collector.spans if span.name == "fetch"]
    assert [root.parent_id for root in roots] == ["", "", ""]
    assert roots[0].trace_id == TRACE
    assert roots[1].trace_id == roots[2].trace_id != TRACE


async def test_a_trace_that_is_not_sampled_is_not_sent() -> None:
    outbox = SpanOutbox()
    with collecting() as collector:
        async with sends(outbox, collector.endpoint):
            put(outbox, f"00-{TRACE}-{PARENT}-00")
            put(outbox)
            await until(lambda: outbox.num_sent == 1)

    assert TRACE not in {span.trace_id for span in collector.spans}


async def test_a_collector_that_is_away_is_said_once_and_gets_all_when_it_is_back(
    said: list[Any],
) -> None:
    outbox = SpanOutbox()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with sends(outbox, f"http://127.0.0.1:{port}"):
        put(outbox)
        await until(lambda: said)
        put(outbox)
        await anyio.sleep(0.2)
        away = events(said)
        with collecting(port) as collector:
            await until(lambda: outbox.num_sent == 2)

    assert away == ["collector.unreachable"]
    assert events(said) == ["collector.unreachable", "collector.reached"]
    assert "Connection refused" in said[0]["reason"]
    assert len(collector.spans) == 2 * len(SPANS)


async def test_a_collector_that_has_no_time_is_asked_again() -> None:
    outbox = SpanOutbox()
    with collecting() as collector:
        collector.status = 503
        async with sends(outbox, collector.endpoint):
            put(outbox)
            await until(lambda: len(collector.headers) >= 2)
            collector.status = 200
            await until(lambda: outbox.num_sent == 1)

    assert outbox.num_dropped == 0


async def test_what_a_collector_refuses_is_dropped(said: list[Any]) -> None:
    outbox = SpanOutbox()
    with collecting() as collector:
        collector.status = 401
        async with sends(outbox, collector.endpoint):
            put(outbox)
            await until(lambda: outbox.num_dropped == 1)

    assert len(collector.headers) == 1
    assert said[0]["reason"] == "HTTP status 401"


async def test_spans_that_cannot_be_made_are_lost_alone(said: list[Any]) -> None:
    outbox = SpanOutbox()

    def fails() -> list[Span]:
        raise ValueError

    with collecting() as collector:
        async with sends(outbox, collector.endpoint):
            outbox.put(fails, "o")
            await until(lambda: outbox.num_dropped == 1)
            put(outbox)
            await until(lambda: outbox.num_sent == 1)

    assert events(said) == ["spans.failed"]


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    outbox = SpanOutbox(max_waiting=2)
    for _ in range(5):
        put(outbox)

    assert outbox.readings() == {"otlp_handoffs": 0, "otlp_dropped": 3}
    assert len(outbox.take(9, settled_by=float("inf"))) == 2


def test_what_has_just_ended_waits_as_the_engine_may_say_when_it_was_told() -> None:
    outbox, began_at = SpanOutbox(), time.monotonic()
    put(outbox)
    ended_at = time.monotonic()

    assert outbox.take(9, settled_by=began_at + SETTLE_S / 2) == []
    assert len(outbox.take(9, settled_by=ended_at + SETTLE_S)) == 1


async def test_what_waits_at_the_end_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.agent.otlp.sender.PERIOD_S", 60.0)
    outbox = SpanOutbox()
    with collecting() as collector:
        async with sends(outbox, collector.endpoint):
            put(outbox)

    assert len(collector.spans) == len(SPANS)


async def test_headers_come_from_the_environment() -> None:
    outbox = SpanOutbox()
    given = "Authorization=Basic%20abc, x-tenant = one"
    with collecting() as collector:
        async with sends(outbox, collector.endpoint, OTEL_EXPORTER_OTLP_HEADERS=given):
            put(outbox)
            await until(lambda: outbox.num_sent == 1)

    assert collector.headers[0]["Authorization"] == "Basic abc"
    assert collector.headers[0]["X-Tenant"] == "one"


@pytest.mark.parametrize("headers", ["x-key=sec%0Aret", "x key=secret", "x-key=secr%E2%82%ACet"])
@pytest.mark.parametrize("variable", HEADERS)
def test_a_header_that_cannot_be_sent_is_refused_at_the_start_and_not_told(
    variable: str, headers: str
) -> None:
    with pytest.raises(ConfigError, match=variable) as refused:
        Collector("http://127.0.0.1:4318", {variable: f"fine=yes,{headers}"})

    assert "header 2" in refused.value.message
    assert "sec" not in refused.value.message


def test_a_redirect_is_a_refusal_and_its_target_is_not_asked() -> None:
    with collecting() as collector, collecting() as elsewhere:
        collector.redirects_to = elsewhere.endpoint
        answer = Collector(collector.endpoint, {HEADERS[0]: "x-key=secret"}).post(b"")

    assert answer == (Answer.REFUSED, "HTTP status 302")
    assert len(collector.headers) == 1
    assert elsewhere.headers == []
