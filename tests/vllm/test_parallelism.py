"""Sides of unlike tensor parallelism, in float32: in bfloat16 a model says other tokens at TP 2."""

import pytest

from tests.vllm.clusters import Cluster, prompt_of
from tests.vllm.shapes import JOINED, SPLIT

SHAPES = {"one to two": SPLIT, "two to one": JOINED}
LENGTHS = (31, 128, 700)
HANDED_OFF_WITHIN_S = 5.0
"""Of milliseconds: a side that waits for a core that it does not get waits for its timeout."""


@pytest.mark.parametrize("pair", SHAPES.values(), ids=SHAPES, indirect=True)
def test_decode_says_what_it_says_alone(pair: Cluster) -> None:
    prompts = [prompt_of(num_tokens, seed=num_tokens) for num_tokens in LENGTHS]
    before = pair.moved()

    together = [future.result() for future in [pair.soon(prompt) for prompt in prompts]]

    assert together == [pair.alone(prompt) for prompt in prompts]
    assert pair.moved() >= before + len(prompts)


@pytest.mark.parametrize("pair", SHAPES.values(), ids=SHAPES, indirect=True)
def test_no_handoff_of_many_stands_still(pair: Cluster, num_handoffs: int) -> None:
    pair.handoff(prompt_of(31, seed=0))
    before = pair.fetched_tokens()
    prompts = [prompt_of(LENGTHS[number % 3], seed=1000 + number) for number in range(num_handoffs)]

    for prompt in prompts:
        pair.soon(prompt).result(HANDED_OFF_WITHIN_S)

    assert pair.fetched_tokens() >= before + sum(len(prompt) - 1 for prompt in prompts)
