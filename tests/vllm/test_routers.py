"""Clients of routers that know nothing of kvbus get what decode says alone, and leave nothing."""

from collections.abc import Iterator

import pytest

from tests.agents import wait_until
from tests.vllm.calls import RefusedError, ask_in_words, chat
from tests.vllm.clusters import NUM_TOKENS, Cluster, prompt_of
from tests.vllm.halting import halted
from tests.vllm.routers import ROUTERS, is_there, router_before
from tests.vllm.shapes import CHUNK_TOKENS, ROUTED

SHAPE = ROUTED
LONG = 3000
ALL_THE_SAME = {"n": 3, "temperature": 0.01, "top_k": 1}
"""Several sequences, which vLLM refuses where it is told to be greedy."""


@pytest.fixture(params=sorted(ROUTERS))
def port(pair: Cluster, request: pytest.FixtureRequest) -> Iterator[int]:
    """That of each router in turn, before the servers of the pair."""
    if not is_there(request.param):
        pytest.skip(f"{request.param} is not installed here: make test-vllm runs this")
    with router_before(pair, request.param) as running:
        yield running


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Prompts that the test with the other router has not had: they would be cached."""
    return 9000 + 100 * sorted(ROUTERS).index(request.node.callspec.params["port"])


def test_clients_at_the_same_time_get_what_decode_says_alone(
    pair: Cluster, port: int, seed: int
) -> None:
    prompts = [prompt_of(40 + 50 * number, seed=seed + 10 + number) for number in range(8)]
    before = pair.fetched_tokens()

    calls = [ask_in_words(port, [prompt], NUM_TOKENS) for prompt in prompts]
    said = [call.completion().tokens for call in calls]

    assert said == [pair.alone(prompt) for prompt in prompts]
    assert pair.fetched_tokens() - before == sum(len(prompt) for prompt in prompts)


def test_a_chat_that_streams_says_the_same(pair: Cluster, port: int, seed: int) -> None:
    prompt = prompt_of(CHUNK_TOKENS + 50, seed=seed + 20)
    before = pair.fetched_tokens()

    streamed = list(chat(port, prompt, NUM_TOKENS, stream=True).stream())

    assert streamed == pair.alone(prompt)
    assert pair.fetched_tokens() - before == len(prompt)


@pytest.mark.parametrize("port", ["vllm-router"], indirect=True)
def test_several_sequences_of_a_prompt_are_handed_off_once(pair: Cluster, port: int) -> None:
    prompt = prompt_of(CHUNK_TOKENS + 50, seed=9100)
    before = pair.fetched_tokens()

    call = ask_in_words(port, [prompt], NUM_TOKENS, **ALL_THE_SAME)

    assert call.sequences() == 3 * [pair.alone(prompt)]
    assert pair.fetched_tokens() - before == len(prompt)


@pytest.mark.parametrize("port", ["smg"], indirect=True)
def test_several_sequences_that_are_not_handed_off_are_right(pair: Cluster, port: int) -> None:
    """Smg sends them to the decode server alone."""
    prompt = prompt_of(CHUNK_TOKENS + 50, seed=9200)

    call = ask_in_words(port, [prompt], NUM_TOKENS, **ALL_THE_SAME)

    assert call.sequences() == 3 * [pair.alone(prompt)]


def test_of_several_prompts_the_first_is_handed_off(pair: Cluster, port: int, seed: int) -> None:
    prompts = [prompt_of(200 + number, seed=seed + 30 + number) for number in range(3)]
    before = pair.fetched_tokens()

    said = ask_in_words(port, prompts, NUM_TOKENS).sequences()

    assert said == [pair.alone(prompt) for prompt in prompts]
    assert pair.fetched_tokens() - before == len(prompts[0])


def test_a_client_that_hangs_up_during_the_prefill_leaves_nothing(
    pair: Cluster, port: int, seed: int
) -> None:
    call = ask_in_words(port, [prompt_of(LONG, seed=seed + 40)], NUM_TOKENS)
    wait_until(pair.reading, "prefill has begun")

    call.abort()

    pair.check()


def test_a_client_that_hangs_up_during_the_fetch_leaves_nothing(
    pair: Cluster, port: int, seed: int
) -> None:
    ended_before = pair.prefill.metric("request_success_total")
    with halted([pair.decode_agent.pid]):
        call = ask_in_words(port, [prompt_of(LONG, seed=seed + 50)], NUM_TOKENS)
        wait_until(
            lambda: pair.prefill.metric("request_success_total") > ended_before,
            "the prompt is prefilled",
        )
        wait_until(lambda: pair.decode.metric("num_requests_waiting"), "decode has it")

        call.abort()

    pair.check()


def test_a_client_that_hangs_up_during_the_stream_leaves_nothing(
    pair: Cluster, port: int, seed: int
) -> None:
    call = chat(port, prompt_of(300, seed=seed + 60), LONG, stream=True, min_tokens=LONG)
    stream = call.stream()
    next(stream)

    stream.close()

    pair.check()


def test_without_a_prefill_server_a_request_is_an_error_that_leaves_nothing(
    pair: Cluster, port: int, seed: int
) -> None:
    pair.prefill.stop()
    try:
        with pytest.raises(RefusedError) as refused:
            ask_in_words(port, [prompt_of(300, seed=seed + 70)], NUM_TOKENS).completion()
    finally:
        pair.prefill.launch()
        pair.prefill.wait_started()

    assert refused.value.status >= 500
    assert pair.decode.blocks_in_use() == 0
