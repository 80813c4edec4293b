"""Models that keep KV in other ways than one group of heads that see everything."""

import pytest

from tests.vllm.clusters import Cluster, prompt_of
from tests.vllm.models import MLA_TOKEN_BYTES, NUM_LAYERS, WINDOW
from tests.vllm.pages import filled_pages
from tests.vllm.shapes import LARGER, SMALLER, Shape, Side, both

SHAPES = {
    "windowed": both("windowed"),
    "hybrid": Shape(
        Side("0", "hybrid", block_size=SMALLER), Side("1", "hybrid", block_size=LARGER)
    ),
}
"""With blocks that are alike, and with those of prefill so small that it keeps less of a window."""
MLA = both("mla")
LENGTHS = (WINDOW // 2, WINDOW + 1, 3 * WINDOW + 5, 1500)
FOUND = (300, 391, 655)
ALL_THE_SAME = {"n": 3, "temperature": 0.01, "top_k": 1}
"""Several sequences, which vLLM refuses where it is told to be greedy."""


@pytest.mark.parametrize("pair", SHAPES.values(), ids=SHAPES, indirect=True)
def test_decode_says_what_it_says_alone(pair: Cluster) -> None:
    prompts = [prompt_of(num_tokens, seed=num_tokens) for num_tokens in LENGTHS]
    before = pair.moved()

    said = [pair.handoff(prompt) for prompt in prompts]

    assert said == [pair.alone(prompt) for prompt in prompts]
    assert pair.moved() >= before + len(prompts)


@pytest.mark.parametrize("pair", SHAPES.values(), ids=SHAPES, indirect=True)
@pytest.mark.parametrize("at_once", [False, True], ids=["ticket", "at once"])
def test_what_was_loaded_is_right_for_whoever_finds_it_in_the_cache(
    pair: Cluster, at_once: bool
) -> None:
    """Other sequences of the request, the prompt again, and prompts that begin like it."""
    for num_tokens in FOUND:
        prompt = prompt_of(num_tokens, seed=1000 * at_once + 10 * num_tokens)
        longer = [*prompt[:-1], *prompt_of(WINDOW // 2, seed=num_tokens)]
        handed = [*longer[: LARGER * (num_tokens // LARGER)], *prompt_of(70, seed=num_tokens + 1)]
        if at_once:
            call, prefill = pair.meet(prompt, **ALL_THE_SAME)
            prefill.completion()
        else:
            call = pair.begin(prompt, pair.ticket(prompt), **ALL_THE_SAME)

        assert call.sequences() == 3 * [pair.alone(prompt)]
        assert pair.again(prompt) == pair.alone(prompt)
        assert pair.again(longer) == pair.alone(longer)
        assert pair.handoff(handed) == pair.alone(handed)


@pytest.mark.parametrize("pair", [MLA], ids=["mla"], indirect=True)
def test_decode_goes_on_as_it_does_alone(pair: Cluster) -> None:
    """As vLLM's MLA on CPUs says other tokens after a prompt than after the same tokens of its own.

    So the last token of each prompt is one that decode would have said itself. Sums of another
    order let the two part later.
    """
    prompts = [prompt_of(num_tokens, seed=num_tokens) for num_tokens in LENGTHS]
    alone = [pair.alone(prompt) for prompt in prompts]
    before = pair.moved()

    said = [pair.handoff([*p, own[0]]) for p, own in zip(prompts, alone, strict=True)]

    assert [tokens[:3] for tokens in said] == [own[1:4] for own in alone]
    assert pair.moved() >= before + len(prompts)


@pytest.mark.parametrize("pair", [MLA], ids=["mla"], indirect=True)
def test_decode_has_the_very_bytes_that_prefill_computed(pair: Cluster) -> None:
    num_blocks = 3
    prompt = prompt_of(num_blocks * pair.prefill.block_size(), seed=99)
    before = filled_pages(pair.prefill, MLA_TOKEN_BYTES)
    ticket = pair.ticket(prompt)
    computed = filled_pages(pair.prefill, MLA_TOKEN_BYTES) - before
    assert len(computed) == num_blocks * NUM_LAYERS
    assert not computed & filled_pages(pair.decode, MLA_TOKEN_BYTES)
    moved_before = pair.moved()

    pair.redeem(prompt, ticket)

    assert pair.moved() > moved_before
    assert computed <= filled_pages(pair.decode, MLA_TOKEN_BYTES)
