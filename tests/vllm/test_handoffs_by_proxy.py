"""Clients of the proxy get what decode says alone, and leave nothing when they hang up."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.agents import wait_until
from tests.vllm.clusters import NUM_TOKENS, Cluster, prompt_of
from tests.vllm.halting import halted
from tests.vllm.proxies import ProxyProcess, proxy_before
from tests.vllm.shapes import CHUNK_TOKENS, UP

SHAPE = UP
LONG = 3000


@pytest.fixture
def proxy(pair: Cluster) -> Iterator[ProxyProcess]:
    with proxy_before(pair) as running:
        yield running


def test_clients_at_the_same_time_get_what_decode_says_alone(
    pair: Cluster, proxy: ProxyProcess
) -> None:
    prompts = [prompt_of(40 + 50 * number, seed=100 + number) for number in range(8)]
    before = pair.moved()

    calls = [proxy.begin(prompt, NUM_TOKENS) for prompt in prompts]
    said = [call.completion().tokens for call in calls]

    assert said == [pair.alone(prompt) for prompt in prompts]
    assert pair.moved() > before


def test_a_client_that_streams_gets_the_same(pair: Cluster, proxy: ProxyProcess) -> None:
    prompt = prompt_of(CHUNK_TOKENS + 50, seed=1)
    before = pair.fetched_tokens()

    streamed = list(proxy.begin(prompt, NUM_TOKENS, stream=True).stream())

    assert streamed == pair.alone(prompt)
    assert pair.fetched_tokens() - before >= CHUNK_TOKENS


def test_a_client_that_hangs_up_during_the_prefill_leaves_nothing(
    pair: Cluster, proxy: ProxyProcess
) -> None:
    call = proxy.begin(prompt_of(LONG, seed=2), NUM_TOKENS)
    wait_until(pair.reading, "prefill has begun")

    call.abort()

    pair.check()


def test_a_client_that_hangs_up_during_the_fetch_leaves_nothing(
    pair: Cluster, proxy: ProxyProcess
) -> None:
    ended_before = pair.prefill.metric("request_success_total")
    with ExitStack() as until_aborted:
        with halted(pair.decode.pids("EngineCore")):
            call = proxy.begin(prompt_of(LONG, seed=3), NUM_TOKENS)
            wait_until(
                lambda: pair.prefill.metric("request_success_total") > ended_before,
                "the prompt is prefilled",
            )
            until_aborted.enter_context(halted([pair.prefill_agent.pid]))
        wait_until(pair.under_way, "the fetch has begun")

        call.abort()

    pair.check()


def test_a_client_that_hangs_up_during_the_stream_leaves_nothing(
    pair: Cluster, proxy: ProxyProcess
) -> None:
    call = proxy.begin(prompt_of(300, seed=4), LONG, stream=True, min_tokens=LONG)
    stream = call.stream()
    next(stream)

    stream.close()

    pair.check()


def test_the_trace_of_a_client_is_known_to_both_agents(pair: Cluster, proxy: ProxyProcess) -> None:
    trace = f"00-{uuid.uuid4().hex}-{uuid.uuid4().hex[:16]}-01"
    pair.decode_agent.skip_log()

    call = proxy.begin(prompt_of(100, seed=9), NUM_TOKENS, headers={"traceparent": trace})
    call.completion()

    request_id = pair.decode_agent.says("handoff.completed")[-1]["request_id"]
    for agent in (pair.prefill_agent, pair.decode_agent):
        spans = agent.trace(request_id=request_id)
        assert spans[0]["attributes"]["traceparent"] == trace
    waited = next(span for span in spans if span["name"] == "pending")
    asked = next(span for span in spans if span["name"] == "asked")
    assert waited["start_s"] < waited["end_s"] == asked["start_s"]
