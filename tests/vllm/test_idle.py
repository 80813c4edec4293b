"""A prefill server whose offers nobody reads rests, and keeps their blocks for who comes late."""

import time

from tests.agents import wait_until
from tests.vllm.clusters import Cluster, prompt_of
from tests.vllm.shapes import PATIENT

SHAPE = PATIENT
NUM_OFFERS = 8
LOOKED_AT_S = 4.0
MOST_OF_A_CORE = 0.2
POOL_TOKENS = 16 * 1024
"""More than a server's KV cache has room for."""


def test_a_server_with_offers_that_nobody_reads_rests(pair: Cluster) -> None:
    prompts = [prompt_of(100, seed=10 + number) for number in range(NUM_OFFERS)]
    tickets = [pair.ticket(prompt) for prompt in prompts]

    wait_until(lambda: share_of_a_core(pair) < MOST_OF_A_CORE, "the server rests")

    said = [pair.redeem(*each) for each in zip(prompts, tickets, strict=True)]
    assert said == [pair.alone(prompt) for prompt in prompts]


def test_blocks_that_are_offered_are_not_given_to_others(pair: Cluster) -> None:
    prompts = [prompt_of(700, seed=30 + number) for number in range(NUM_OFFERS)]
    tickets = [pair.ticket(prompt) for prompt in prompts]

    for number in range(2 * POOL_TOKENS // 2000):
        pair.prefill.complete(prompt_of(2000, seed=50 + number), 1)

    said = [pair.redeem(*each) for each in zip(prompts, tickets, strict=True)]
    assert said == [pair.alone(prompt) for prompt in prompts]


def test_a_request_that_has_no_room_beside_offers_goes_on_when_they_are_read(
    pair: Cluster,
) -> None:
    prompts = [prompt_of(3000, seed=80 + number) for number in range(5)]
    tickets = [pair.ticket(prompt) for prompt in prompts]
    wait_until(lambda: share_of_a_core(pair) < MOST_OF_A_CORE, "the server rests")

    more = pair.prefill.begin(prompt_of(3000, seed=90), 1)
    wait_until(lambda: pair.prefill.metric("num_requests_waiting") == 1, "it waits for blocks")
    said = [pair.redeem(*each) for each in zip(prompts, tickets, strict=True)]

    assert len(more.completion().tokens) == 1
    assert said == [pair.alone(prompt) for prompt in prompts]


def share_of_a_core(pair: Cluster) -> float:
    """What the prefill server's scheduler and worker take of one core, for a while."""
    before = pair.prefill.cpu_s("VLLM::")
    time.sleep(LOOKED_AT_S)
    share = (pair.prefill.cpu_s("VLLM::") - before) / LOOKED_AT_S
    print(f"{share:.3f} of a core")
    return share
