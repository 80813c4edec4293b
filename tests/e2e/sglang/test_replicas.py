"""Data-parallel replicas on both sides: each is an engine of its own at the agent of its server."""

import pytest

from tests.e2e.sglang.clusters import CHUNK_TOKENS, Cluster, num_completed, prompt_of
from tests.e2e.sglang.conftest import Alone
from tests.support.agents import wait_until

pytestmark = pytest.mark.long
CLUSTER = "replicas"
LENGTHS = (1, 15, 16, 17, 64, CHUNK_TOKENS + 1, 700)
TIMES = 4


@pytest.mark.kind("data-parallel replicas", on="servers")
def test_each_replica_of_prefill_hands_off_to_each_of_decode(pair: Cluster, alone: Alone) -> None:
    prompts = [prompt_of(length, seed=length + n) for n in range(TIMES) for length in LENGTHS]
    before, agent = num_completed(pair.decode_agent), pair.decode_agent

    said = list(pair.threads.map(pair.handoff, prompts))

    assert said == [alone(prompt) for prompt in prompts]
    wait_until(lambda: num_completed(agent) == before + len(prompts), "handoffs")
    done = agent.logged("handoff.completed")[before:]
    # SGLang sends a request to the replica of prefill that its room names.
    used = {(int(one["request_id"][5:]) % 2, one["engine_id"][-4:]) for one in done}
    assert used == {(number, name) for number in range(2) for name in ("-dp0", "-dp1")}
