"""A decode server whose memory is too small for its requests: it retracts some of them."""

from pathlib import Path

import pytest

from tests.e2e.sglang.clusters import Shape, Side, cluster, num_completed, prompt_of
from tests.e2e.sglang.conftest import ServerAlone
from tests.support.agents import wait_until

pytestmark = pytest.mark.long
NUM_REQUESTS, NUM_TOKENS = 6, 600
SMALL = ("--max-total-tokens", "1536", "--num-reserved-decode-tokens", "16")
COPIES = (*SMALL, "--disaggregation-decode-retraction-backup", "cpu_tensor")


@pytest.mark.kind("requests that decode retracts for want of memory", on="servers")
def test_retracted_requests_continue_from_a_copy_without_a_handoff(
    models: Path, server_alone: ServerAlone, tmp_path: Path
) -> None:
    prompts = [prompt_of(60 + number, seed=700 + number) for number in range(NUM_REQUESTS)]
    one = server_alone("gqa")

    with cluster(Shape(Side(16), Side(16, flags=COPIES)), models, tmp_path) as pair:
        pair.wait_started()
        before = num_completed(pair.decode_agent)
        calls = []
        for prompt in prompts:
            room = pair.room()
            prefill = pair.prefill.begin(prompt, NUM_TOKENS, **room)
            calls.append((prefill, pair.decode.begin(prompt, NUM_TOKENS, **room)))
        first, said = zip(*[(one.tokens(), two.tokens()) for one, two in calls], strict=True)
        assert [tokens[:1] for tokens in said] == [tokens[:1] for tokens in first]

        assert pair.decode.metric("num_retracted_requests_total") > 0
        wait_until(
            lambda: num_completed(pair.decode_agent) == before + NUM_REQUESTS, "all handoffs"
        )
        pair.check()

    one.wait_started()
    assert list(said) == [one.generate(prompt, NUM_TOKENS) for prompt in prompts]
