"""kvbus and two connectors of vLLM as children of its `MultiConnector`, from one rank to two.

`ExampleConnector` keeps prompts on disk and does not know ranks: decode gets each prompt once, or
has it in host memory, where `OffloadingConnector` keeps its blocks.
"""

import pytest

from tests.e2e.vllm.calls import post
from tests.e2e.vllm.clusters import (
    LARGER,
    NUM_TOKENS,
    SETTLES_WITHIN_S,
    SMALLER,
    Cluster,
    prompt_of,
)
from tests.e2e.vllm.tickets import WRONG
from tests.support.agents import wait_until

CLUSTER = "multi"
CHECKED_AT_LAST = True


def test_a_handoff_is_served_and_counted(pair: Cluster) -> None:
    """vLLM's API server ends when it cannot read the statistics of a child."""
    prompts = [prompt_of(300, seed) for seed in range(2)]

    said = [pair.handoff(prompt) for prompt in prompts]

    assert said == [pair.prefill.complete(prompt, NUM_TOKENS).tokens for prompt in prompts]
    loads = "kvbus_loads_total"
    wait_until(
        lambda: pair.decode.metric(loads, outcome="completed") == 2, "2 loads", SETTLES_WITHIN_S
    )


def test_blocks_that_kvbus_has_loaded_come_back_from_host_memory(pair: Cluster) -> None:
    """And kvbus hands off what prefill has loaded from there."""
    prompt, servers = prompt_of(300, 5), (pair.prefill, pair.decode)
    said, before = [pair.handoff(prompt)], pair.moved()
    loaded = [server.from_elsewhere() for server in servers]

    post(pair.decode.port, "/reset_prefix_cache", {})
    said.append(pair.again(prompt))
    for server in servers:
        post(server.port, "/reset_prefix_cache", {})
    said.append(pair.handoff(prompt))

    assert said == 3 * [pair.prefill.complete(prompt, NUM_TOKENS).tokens]
    more = [now.from_elsewhere() - then for now, then in zip(servers, loaded, strict=True)]
    assert more == [300 // SMALLER * SMALLER, 300 // LARGER * LARGER + 300]
    assert pair.moved() > before


@pytest.mark.parametrize("kind", ["of an unknown offer", "without secret"])
def test_a_load_that_fails_ends_and_its_prompt_is_computed(pair: Cluster, kind: str) -> None:
    prompt = prompt_of(300, 10 * len(kind))

    said = pair.redeem(prompt, WRONG[kind](pair.ticket(prompt)))

    assert said == pair.prefill.complete(prompt, NUM_TOKENS).tokens
