"""Speculative decoding with an EAGLE head on both sides: its layer's KV is handed off, too."""

import pytest

from tests.e2e.vllm.clusters import Cluster, prompt_of
from tests.e2e.vllm.models import GROUPED, NUM_LAYERS
from tests.e2e.vllm.servers import VllmServer

CLUSTER = "drafts"
LAYER_BYTES = 2 * 4 * GROUPED["num_key_value_heads"] * GROUPED["head_dim"]
"""Of a token, in float32."""


def accepted(server: VllmServer) -> tuple[float, float]:
    """Drafts that the model accepted so far, and all drafts."""
    names = "num_accepted_tokens_total", "num_draft_tokens_total"
    first, second = (server.metric(f"spec_decode_{name}") for name in names)
    return first, second


@pytest.mark.kind("EAGLE head on both sides", on="servers")
@pytest.mark.parametrize("num_tokens", [2, 101, 301])
def test_handed_off_prompt_is_drafted_as_well_as_alone(pair: Cluster, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, seed=num_tokens)
    first = accepted(pair.decode)
    alone = pair.alone(prompt)
    second, before = accepted(pair.decode), pair.moved()

    said = pair.handoff(prompt, cache_salt="loads all")

    third = accepted(pair.decode)
    assert said == alone
    assert pair.moved() - before == num_tokens * (NUM_LAYERS + 1) * LAYER_BYTES
    good_alone, good = second[0] - first[0], third[0] - second[0]
    assert good == good_alone > 0
