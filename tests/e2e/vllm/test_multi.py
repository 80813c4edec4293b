"""kvbus and `ExampleConnector` as children of vLLM's `MultiConnector`, from one rank to two.

`ExampleConnector` keeps prompts on disk and does not know ranks: decode gets each prompt once.
"""

import pytest

from tests.e2e.vllm.clusters import NUM_TOKENS, SETTLES_WITHIN_S, Cluster, prompt_of
from tests.e2e.vllm.tickets import WRONG
from tests.support.agents import wait_until

CLUSTER = "multi"


def test_a_handoff_is_served_and_counted(pair: Cluster) -> None:
    """vLLM's API server ends when it cannot read the statistics of a child."""
    prompts = [prompt_of(300, seed) for seed in range(2)]

    said = [pair.handoff(prompt) for prompt in prompts]

    assert said == [pair.prefill.complete(prompt, NUM_TOKENS).tokens for prompt in prompts]
    loads = "kvbus_loads_total"
    wait_until(
        lambda: pair.decode.metric(loads, outcome="completed") == 2, "2 loads", SETTLES_WITHIN_S
    )


@pytest.mark.parametrize("kind", ["of an unknown offer", "without secret"])
def test_a_load_that_fails_ends_and_its_prompt_is_computed(pair: Cluster, kind: str) -> None:
    prompt = prompt_of(300, 10 * len(kind))

    said = pair.redeem(prompt, WRONG[kind](pair.ticket(prompt)))

    assert said == pair.prefill.complete(prompt, NUM_TOKENS).tokens
