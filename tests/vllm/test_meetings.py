"""Both servers get a request at the same time: decode reads what prefill still computes."""

import pytest

from tests.agents import wait_until
from tests.vllm.clusters import Cluster, prompt_of
from tests.vllm.shapes import CHUNK_TOKENS, LARGER, UP

SHAPE = UP
MANY_CHUNKS = 12 * CHUNK_TOKENS + 7


@pytest.mark.parametrize("num_tokens", [1, LARGER + 1, CHUNK_TOKENS + 7, MANY_CHUNKS])
def test_decode_says_what_it_says_alone(pair: Cluster, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, seed=7000 + num_tokens)
    before = pair.moved()

    decode, prefill = pair.meet(prompt)
    tokens = decode.completion().tokens
    prefill.completion()

    assert tokens == pair.alone(prompt)
    assert pair.moved() > before


def test_an_offer_grows_with_each_step_of_prefill(pair: Cluster) -> None:
    prompt = prompt_of(MANY_CHUNKS, seed=7100)

    decode, prefill = pair.meet(prompt)
    decode.completion()
    params = prefill.completion().params

    assert params is not None
    story = pair.prefill_agent.status(offer_id=params["ticket"]["offer_id"])["story"]
    assert sum("Extended" in step for step in story) >= 10


def test_requests_at_the_same_time_do_not_mix(pair: Cluster) -> None:
    prompts = [prompt_of(40 + 60 * number, seed=7200 + number) for number in range(12)]

    calls = [pair.meet(prompt) for prompt in prompts]
    said = [decode.completion().tokens for decode, _ in calls]
    for _, prefill in calls:
        prefill.completion()

    assert said == [pair.alone(prompt) for prompt in prompts]


def test_what_both_have_cached_is_handed_over_again(pair: Cluster) -> None:
    prompt = prompt_of(3 * LARGER + 1, seed=7300)
    first = pair.handoff(prompt)

    decode, prefill = pair.meet(prompt)
    prefill.completion()

    assert decode.completion().tokens == first


def test_who_has_another_prompt_loads_nothing(pair: Cluster) -> None:
    prompt, other = prompt_of(200, seed=7400), prompt_of(200, seed=7401)
    to_decode, to_prefill = pair.meeting()
    before = pair.moved()

    wrong = pair.begin(other, to_decode)
    pair.prefill.complete(prompt, 1, kv_transfer_params=to_prefill)

    assert wrong.completion().tokens == pair.alone(other)
    assert pair.moved() == before


def test_when_decode_hangs_up_prefill_has_its_blocks_back(pair: Cluster) -> None:
    decode, prefill = pair.meet(prompt_of(MANY_CHUNKS, seed=7500))
    wait_until(pair.under_way, "the fetch has begun")
    decode.abort()
    prefill.completion()

    pair.check()


def test_when_prefill_hangs_up_decode_computes_the_prompt(pair: Cluster) -> None:
    prompt = prompt_of(MANY_CHUNKS, seed=7600)
    decode, prefill = pair.meet(prompt)
    wait_until(pair.reading, "prefill computes")
    prefill.abort()

    assert decode.completion().tokens == pair.alone(prompt)


def test_when_both_hang_up_nothing_is_left(pair: Cluster) -> None:
    decode, prefill = pair.meet(prompt_of(MANY_CHUNKS, seed=7700))
    wait_until(pair.reading, "prefill computes")
    prefill.abort()
    decode.abort()

    pair.check()


def test_when_only_decode_is_asked_it_computes_the_prompt_at_its_deadline(pair: Cluster) -> None:
    prompt = prompt_of(100, seed=7800)
    to_decode, _ = pair.meeting()

    assert pair.redeem(prompt, to_decode) == pair.alone(prompt)
