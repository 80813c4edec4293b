"""Sides of unlike tensor parallelism, in float32: in bfloat16 a model says other tokens at TP 2."""

import pytest

from tests.vllm.clusters import Cluster, prompt_of
from tests.vllm.shapes import JOINED, SPLIT

SHAPES = {"one to two": SPLIT, "two to one": JOINED}
LENGTHS = (31, 128, 700)


@pytest.mark.parametrize("pair", SHAPES.values(), ids=SHAPES, indirect=True)
def test_decode_says_what_it_says_alone(pair: Cluster) -> None:
    prompts = [prompt_of(num_tokens, seed=num_tokens) for num_tokens in LENGTHS]
    before = pair.moved()

    together = [future.result() for future in [pair.soon(prompt) for prompt in prompts]]

    assert together == [pair.alone(prompt) for prompt in prompts]
    assert pair.moved() >= before + len(prompts)
