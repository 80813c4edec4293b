"""States of Mamba 2, handed off beside attention in the same layers."""

import pytest

from tests.e2e.vllm.clusters import Cluster, prompt_of

CLUSTER = "mamba"
BLOCK = 128
"""vLLM's block size for the model on a CPU."""


@pytest.mark.kind("Mamba 2 beside attention, without prefix caching", on="servers")
@pytest.mark.parametrize("num_tokens", [2, BLOCK + 1, 300, 4 * BLOCK + 1])
def test_decode_goes_on_with_the_state_of_prefill(pair: Cluster, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, seed=num_tokens)
    alone, before = pair.alone(prompt), pair.moved()

    said = pair.handoff(prompt, cache_salt="loads all")

    assert said == alone
    assert pair.moved() > before


def test_prompts_asked_twice_say_the_same(pair: Cluster) -> None:
    prompt = prompt_of(300, seed=1)
    alone = pair.alone(prompt)

    assert [pair.handoff(prompt) for _ in range(3)] == 3 * [alone]


def test_handoffs_at_once_keep_their_states_apart(pair: Cluster) -> None:
    prompts = [prompt_of(40 + 10 * number, seed=number) for number in range(6)]
    alone = [pair.alone(prompt) for prompt in prompts]

    said = [pair.soon(prompt) for prompt in prompts]

    assert [one.result() for one in said] == alone


def test_decode_that_awaits_a_prompt_gets_its_state(pair: Cluster) -> None:
    prompt = prompt_of(200, seed=7)
    alone, before = pair.alone(prompt), pair.moved()

    decode, prefill = pair.meet(prompt)

    assert decode.completion().tokens == alone
    prefill.completion()
    assert pair.moved() > before
