"""Caches of float8 with one scale a tensor: decode reads a quarter of the bytes of float32."""

from pathlib import Path

import pytest

from tests.e2e.vllm.clusters import Cluster, prompt_of
from tests.e2e.vllm.models import GROUPED, NUM_LAYERS

pytestmark = pytest.mark.skipif(
    "avx512vl" not in Path("/proc/cpuinfo").read_text(),
    reason="vLLM needs AVX-512 for float8 on a CPU",
)
CLUSTER = "fp8"
TOKEN_BYTES = 2 * NUM_LAYERS * GROUPED["num_key_value_heads"] * GROUPED["head_dim"]


@pytest.mark.kind("fp8 with one scale for each tensor (the test needs AVX-512)", on="servers")
@pytest.mark.parametrize("num_tokens", [1, 33, 64, 129, 301])
def test_handed_off_prompt_gets_the_tokens_of_decode_alone(pair: Cluster, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, seed=num_tokens)
    alone, before = pair.alone(prompt), pair.moved()

    assert pair.handoff(prompt, cache_salt="loads all") == alone
    assert pair.moved() - before == num_tokens * TOKEN_BYTES


def test_many_prompts_at_once_get_their_own_tokens(pair: Cluster) -> None:
    prompts = [prompt_of(50 + 13 * number, seed=1000 + number) for number in range(20)]
    alone = [pair.alone(prompt) for prompt in prompts]

    said = [one.result() for one in [pair.soon(prompt) for prompt in prompts]]

    assert said == alone
