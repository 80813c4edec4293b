"""Data-parallel ranks of a decode server: engines of their own, at one agent."""

import pytest

from tests.e2e.vllm.clusters import Cluster, prompt_of

CLUSTER = "ranks"
NUM_PROMPTS = 12


@pytest.mark.kind("data-parallel ranks of decode", on="servers")
@pytest.mark.long
def test_each_rank_loads_what_it_decodes(pair: Cluster) -> None:
    prompts = [prompt_of(40 + 17 * number, seed=number) for number in range(NUM_PROMPTS)]
    alone = [pair.alone(prompt) for prompt in prompts]
    before = pair.moved()

    said = [one.result() for one in [pair.soon(prompt) for prompt in prompts]]

    assert said == alone
    assert pair.moved() > before
    loaded = {rank: pair.decode.metric("kvbus_loads_total", engine=rank) for rank in ("0", "1")}
    assert all(loaded.values()), loaded
