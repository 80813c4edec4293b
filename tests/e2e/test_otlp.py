"""Both agents send the spans of a handoff to a collector, as parts of one trace."""

import os
import uuid
from collections.abc import Iterator

import anyio
import pytest

from kvbus.agent.otlp.sender import MAX_PAUSE_S
from kvbus.engine import DecodeSession
from kvbus.protocol import Rendezvous
from tests.agents import Agents, agents_ended, free_port, until
from tests.collector import collecting
from tests.engines import engine, failure_of, pair

pytestmark = pytest.mark.anyio

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def port() -> int:
    """Where the collector is, once it is there."""
    return free_port()


@pytest.fixture(scope="module")
def sending(port: int) -> Iterator[Agents]:
    """Agents that send spans."""
    with agents_ended(Agents) as agents:
        endpoint = f"http://127.0.0.1:{port}"
        agents.start(*(agents.prepare(r, otlp_endpoint=endpoint) for r in ("prefill", "decode")))
        yield agents


async def hand_off(sending: Agents, traceparent: str) -> str:
    prefill, decode = sending.all
    name = uuid.uuid4().hex
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer(
            name, num_tokens=16, block_ids={"full": [1]}, traceparent=traceparent
        )
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
        await fetch.completed()
    return offer.offer_id


async def test_both_agents_send_the_spans_of_the_trace_that_the_engine_named(sending, port):
    with collecting(port) as collector:
        await hand_off(sending, f"00-{TRACE}-{PARENT}-01")
        await until(lambda: collector.of("kvbus-prefill") and collector.of("kvbus-decode"))

    assert {span.trace_id for span in collector.spans} == {TRACE}
    roots = [span.name for span in collector.spans if span.parent_id == PARENT]
    assert sorted(roots) == ["fetch", "offer"]
    assert {"leased", "sealed"} <= {span.name for span in collector.of("kvbus-prefill")}
    of_fetch = {span.name: span for span in collector.of("kvbus-decode")}
    assert {"claiming", "reading", "READ", "confirming"} <= of_fetch.keys()
    assert of_fetch["fetch"].attributes["kvbus.num_bytes"] > 0
    agents = {span.resource["kvbus.agent_id"] for span in collector.spans}
    assert agents == {agent.settings["agent_id"] for agent in sending.all}


async def test_the_ways_between_engines_and_agents_are_sent_as_well(sending, port):
    prefill, decode = sending.all
    ways = {(role, way) for role in ("prefill", "decode") for way in ("asked", "telling")}
    sent: set[tuple[str, str]] = set()
    with collecting(port) as collector:
        async with pair(prefill.attach, decode.attach) as (source, target):
            for _ in range(5):  # an engine that is very late to say when it was told is not heard
                offer = await source.prefill.offer(
                    uuid.uuid4().hex, num_tokens=16, block_ids={"full": [1]}
                )
                fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
                await fetch.completed()
                await until(lambda: all(collector.of(f"kvbus-{role}") for role, _ in ways))
                for role, way in ways:
                    sent |= {(role, s.name) for s in collector.of(f"kvbus-{role}") if s.name == way}
                if sent == ways:
                    break
                collector.spans.clear()

    assert sent == ways


async def test_without_a_trace_both_have_the_one_of_the_offer(sending, port):
    with collecting(port) as collector:
        offer_id = await hand_off(sending, "")
        await until(lambda: collector.of("kvbus-prefill") and collector.of("kvbus-decode"))

    assert {span.trace_id for span in collector.spans} == {offer_id}


async def test_a_fetch_that_failed_is_sent_with_its_error(sending, port):
    prefill, decode = sending.all
    with collecting(port) as collector:
        async with pair(prefill.attach, decode.attach) as (source, target):
            offer = await source.prefill.offer("gone", num_tokens=16, block_ids={"full": [1]})
            await offer.withdraw()
            await failure_of(
                target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
            )
        await until(lambda: collector.of("kvbus-decode"))

    (fetch,) = [span for span in collector.of("kvbus-decode") if span.name == "fetch"]
    assert fetch.error.startswith("offer_withdrawn")


async def test_a_collector_that_is_away_costs_nothing_but_a_line(sending, port):
    for _ in range(3):
        with anyio.fail_after(30):
            await hand_off(sending, "")
    for agent in sending.all:
        agent.says("collector.unreachable")

    with collecting(port) as collector:
        for agent in sending.all:
            await until(lambda a=agent: a.logged("collector.reached"), 2 * MAX_PAUSE_S)
        await until(lambda: len({span.trace_id for span in collector.spans}) >= 3)

    for agent in sending.all:
        await until(lambda a=agent: a.metric("otlp_handoffs") >= 3)
        assert agent.metric("otlp_dropped") == 0


async def test_agents_that_send_nothing_import_nothing_for_it(sending, prefill):
    assert prefill.memory_maps("google/_upb") == 0
    assert sending.all[0].memory_maps("google/_upb") > 0


async def test_an_agent_that_lacks_the_package_says_what_to_install(tmp_path):
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").touch()
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    with agents_ended(Agents) as agents:
        agent = agents.prepare("prefill", env={"PYTHONPATH": path}, otlp_endpoint="http://x:4318")
        agent.launch()

        assert agent.exit_status() == 1
        assert "pip install 'kvbus[otel]'" in agent.log_path.read_text()


async def test_fetches_of_offers_that_were_never_made_are_traces_of_their_own(sending, port):
    prefill, decode = sending.all
    with collecting(port) as collector:
        async with engine(DecodeSession, decode.attach) as target:
            fetches = [
                target.decode.fetch(
                    Rendezvous(uuid.uuid4().hex, prefill.peer).to_json(),
                    num_tokens=16,
                    block_ids={"full": [number]},
                    timeout_s=0.3,
                )
                for number in range(2)
            ]
            for fetch in fetches:
                await failure_of(fetch)
            names = {fetch.fetch_id for fetch in fetches}
            await until(lambda: names <= {span.trace_id for span in collector.spans})
