"""Data-parallel ranks of both servers: engines of their own, at one agent."""

import pytest

from tests.e2e.vllm.clusters import Cluster, prompt_of

CLUSTER = "ranks"
NUM_PROMPTS = 12


@pytest.mark.kind("data-parallel ranks on both sides", on="servers")
@pytest.mark.long
def test_each_rank_offers_its_prompts_and_loads_what_it_decodes(pair: Cluster) -> None:
    prompts = [prompt_of(40 + 17 * number, seed=number) for number in range(NUM_PROMPTS)]
    alone = [pair.alone(prompt) for prompt in prompts]
    before = pair.moved()

    said = [one.result() for one in [pair.soon(prompt) for prompt in prompts]]

    assert said == alone
    assert pair.moved() > before
    for server, name in ((pair.prefill, "offers"), (pair.decode, "loads")):
        by_rank = [server.metric(f"kvbus_{name}_total", engine=rank) for rank in ("0", "1")]
        assert all(by_rank), (name, by_rank)
