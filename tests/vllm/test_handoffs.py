"""What decode says after another server has read the prompt is what it says alone.

Small blocks to large ones, prompts that are cut into chunks, and cached on both sides.
"""

import pytest

from tests.vllm.clusters import Cluster, prompt_of
from tests.vllm.shapes import CHUNK_TOKENS, LARGER, SMALLER, UP

SHAPE = UP
MOST_TOKENS = 3000


@pytest.mark.parametrize(
    "num_tokens",
    [SMALLER - 1, SMALLER, SMALLER + 1, LARGER, LARGER + 1, CHUNK_TOKENS + 7, MOST_TOKENS],
)
def test_decode_says_what_it_says_alone(pair: Cluster, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, seed=num_tokens)
    before = pair.moved()

    tokens = pair.handoff(prompt)

    assert tokens == pair.alone(prompt)
    assert pair.moved() > before


def test_kv_comes_by_mapped_memory_where_users_have_both_sides_on_one_machine(
    pair: Cluster,
) -> None:
    pair.handoff(prompt_of(CHUNK_TOKENS + 9, seed=9))

    assert pair.decode_agent.says("handoff.completed")[-1]["path"] == "mapped"


def test_a_stream_says_the_same(pair: Cluster) -> None:
    prompt = prompt_of(150, seed=10)
    ticket = pair.ticket(prompt)

    streamed = list(pair.begin(prompt, ticket, stream=True).stream())

    assert streamed == pair.alone(prompt)


def test_a_prompt_of_one_token_is_served(pair: Cluster) -> None:
    prompt = prompt_of(1, seed=11)

    tokens = pair.handoff(prompt)

    assert tokens == pair.alone(prompt)


def test_requests_at_the_same_time_do_not_mix(pair: Cluster) -> None:
    prompts = [prompt_of(40 + 30 * number, seed=100 + number) for number in range(16)]

    said = [future.result() for future in [pair.soon(prompt) for prompt in prompts]]

    assert said == [pair.alone(prompt) for prompt in prompts]


def test_more_requests_than_there_are_blocks_for_are_all_served(pair: Cluster) -> None:
    prompts = [prompt_of(2000, seed=200 + number) for number in range(12)]

    said = [future.result() for future in [pair.soon(prompt) for prompt in prompts]]

    assert said == [pair.alone(prompt) for prompt in prompts]


def test_only_what_decode_has_not_cached_is_fetched(pair: Cluster) -> None:
    known = prompt_of(3 * LARGER, seed=12)
    pair.handoff([*known, 5])
    longer = [*known, *prompt_of(100, seed=13)]
    ticket = pair.ticket(longer)
    before = pair.fetched_tokens()

    tokens = pair.redeem(longer, ticket)

    assert 0 < pair.fetched_tokens() - before <= 100
    assert tokens == pair.alone(longer)


def test_a_prompt_that_decode_has_cached_whole_only_releases_the_prefill_side(
    pair: Cluster,
) -> None:
    prompt = [*prompt_of(3 * LARGER, seed=14), 5]
    first = pair.handoff(prompt)
    before = pair.fetched_tokens()

    again = pair.handoff(prompt)

    assert again == first
    assert pair.fetched_tokens() - before <= 1


def test_a_prompt_that_decode_has_cached_to_the_last_block_is_served(pair: Cluster) -> None:
    prompt = prompt_of(3 * LARGER, seed=15)
    first = pair.handoff(prompt)

    again = pair.handoff(prompt)

    assert again == first == pair.alone(prompt)


def test_a_prompt_that_prefill_has_cached_is_handed_over_again(pair: Cluster) -> None:
    prompt = prompt_of(333, seed=16)
    pair.handoff(prompt)
    before = pair.moved()

    tokens = pair.handoff(prompt, cache_salt="not what decode has cached")

    assert pair.moved() > before
    assert tokens == pair.alone(prompt)


def test_requests_without_handoff_run_beside_those_with_one(pair: Cluster) -> None:
    prompts = [prompt_of(120, seed=300 + number) for number in range(6)]
    handed = [pair.soon(prompt) for prompt in prompts]

    own = [pair.alone(prompt) for prompt in prompts]

    assert [future.result() for future in handed] == own
