"""Deployments that `make test-vllm` leaves out, as it has what they add elsewhere.

Windows alone, two ranks to one, servers of unlike models, and errors in conversations.
"""

import pytest

from tests.agents import wait_until
from tests.vllm.calls import RefusedError
from tests.vllm.clusters import ALL_THE_SAME, Cluster, prompt_of
from tests.vllm.models import WINDOW
from tests.vllm.test_turns import LENGTHS, last_turn, turn

pytestmark = pytest.mark.long


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("running", names, indirect=True)


@on("windowed", "joined")
def test_decode_says_what_it_says_alone(pair: Cluster) -> None:
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    before = pair.moved()

    said = [one.result() for one in [pair.soon(prompt) for prompt in prompts]]

    assert said == [pair.alone(prompt) for prompt in prompts]
    assert pair.moved() >= before + len(prompts)


@on("windowed", "joined")
def test_what_was_loaded_at_once_is_right_for_whoever_finds_it_in_the_cache(pair: Cluster) -> None:
    prompt = prompt_of(391, seed=1)
    longer = [*prompt[:-1], *prompt_of(WINDOW // 2, seed=2)]

    call, prefill = pair.meet(prompt, **ALL_THE_SAME)
    prefill.completion()

    assert call.sequences() == 3 * [pair.alone(prompt)]
    assert pair.again(prompt) == pair.alone(prompt)
    assert pair.again(longer) == pair.alone(longer)


@on("joined")
def test_no_handoff_of_many_stands_still(pair: Cluster) -> None:
    pair.handoff(prompt_of(31, seed=0))
    prompts = [prompt_of((31, 128, 700)[number % 3], seed=10 + number) for number in range(30)]
    before = pair.decode.from_elsewhere()

    for prompt in prompts:
        pair.handoff(prompt)

    assert pair.decode.from_elsewhere() >= before + sum(len(prompt) - 1 for prompt in prompts)


@on("others")
def test_what_another_model_has_read_is_not_used(pair: Cluster) -> None:
    prompts = [prompt_of(250, seed=seed) for seed in (1, 2)]
    decode, prefill = pair.meet(prompts[1])
    prefill.completion()

    said = [pair.handoff(prompts[0]), decode.completion().tokens]

    assert said == [pair.alone(prompt) for prompt in prompts]
    assert pair.moved() == 0
    assert pair.decode.trouble()


@on("turns failing")
def test_a_turn_is_served_without_anything_new(pair: Cluster) -> None:
    first = turn(pair, prompt_of(300, seed=2))
    prompt = [*first.prompt, *first.answer]

    assert last_turn(pair, prompt, first.params, cache_salt="same") == pair.alone(prompt, 24)


@on("turns failing")
def test_a_ticket_that_has_expired_or_is_of_another_conversation_is_an_error(
    pair: Cluster,
) -> None:
    first, other, late = (turn(pair, prompt_of(300, seed=seed)) for seed in (3, 4, 5))

    with pytest.raises(RefusedError) as refused:
        last_turn(pair, first.then(50, seed=6), other.params, cache_salt="other")
    wait_until(pair.agent_of_answers.idle, "the offers have expired")
    with pytest.raises(RefusedError) as expired:
        last_turn(pair, late.then(50, seed=7), late.params, cache_salt="expired")

    assert (refused.value.status, expired.value.status) == (500, 500)
