"""Two ranks to one, small pages to large ones, by NIXL."""

import pytest

from tests.e2e.sglang.clusters import CHUNK_TOKENS, Cluster, prompt_of
from tests.e2e.sglang.conftest import Alone

CLUSTER = "ranks"
LENGTHS = (1, 16, 17, CHUNK_TOKENS, 700)


@pytest.mark.kind("tensor parallelism, other page sizes, GQA", on="servers")
def test_two_ranks_hand_off_to_one(pair: Cluster, alone: Alone) -> None:
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]

    said = [pair.handoff(prompt) for prompt in prompts]
    again = [pair.handoff(prompt) for prompt in prompts]

    assert said == again == [alone(prompt) for prompt in prompts]
    assert pair.decode_agent.says("handoff.completed")[-1]["path"] != "mapped"


def test_many_at_once_do_not_disturb_each_other(pair: Cluster, alone: Alone) -> None:
    prompts = [prompt_of(25 * number + 1, seed=200 + number) for number in range(16)]

    said = list(pair.threads.map(pair.handoff, prompts))

    assert said == [alone(prompt) for prompt in prompts]
