"""vLLM's policy `fail` in conversations: with signed tickets, and a model with windows."""

import pytest

from tests.agents import wait_until
from tests.vllm.calls import RefusedError
from tests.vllm.clusters import Cluster, prompt_of
from tests.vllm.models import WINDOW
from tests.vllm.shapes import TURNS_FAILING
from tests.vllm.turns import alone, computed, last_turn, turn

SHAPE = TURNS_FAILING


@pytest.mark.parametrize("num_tokens", [80, 2 * WINDOW, 1000])
def test_prefill_computes_only_what_is_new(pair: Cluster, num_tokens: int) -> None:
    first = turn(pair, prompt_of(num_tokens, seed=num_tokens))
    prompt = first.then(50, seed=1)
    before = computed(pair.prefill)

    answer = last_turn(pair, prompt, first.params, cache_salt="another")

    # Decode computes the last token of a prompt for a model with windows.
    assert computed(pair.prefill) - before == 50 + 1 - 1
    assert answer == alone(pair, prompt)


def test_a_turn_without_anything_new_is_served(pair: Cluster) -> None:
    first = turn(pair, prompt_of(300, seed=2))

    assert last_turn(pair, first.said, first.params, cache_salt="same") == alone(pair, first.said)


def test_a_ticket_that_has_expired_is_an_error(pair: Cluster) -> None:
    first = turn(pair, prompt_of(300, seed=3))
    wait_until(pair.agent_of_answers.idle, "the offer has expired")

    with pytest.raises(RefusedError) as refused:
        last_turn(pair, first.then(50, seed=4), first.params, cache_salt="expired")

    assert refused.value.status == 500


def test_the_ticket_of_another_conversation_is_an_error(pair: Cluster) -> None:
    first, other = (turn(pair, prompt_of(300, seed=seed)) for seed in (5, 6))

    with pytest.raises(RefusedError) as refused:
        last_turn(pair, first.then(50, seed=7), other.params, cache_salt="other")

    assert refused.value.status == 500
