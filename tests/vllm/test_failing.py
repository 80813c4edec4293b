"""vLLM's policy `fail`: a request whose KV cannot be loaded is an error, and the only one.

Large blocks to small ones; offers that wait for a reader for a few seconds only.
"""

import pytest

from tests.agents import wait_until
from tests.vllm.calls import Call, RefusedError
from tests.vllm.clusters import Cluster, prompt_of, works_again
from tests.vllm.shapes import FAILING
from tests.vllm.tickets import WRONG

SHAPE = FAILING


def status(call: Call) -> int:
    """The HTTP status of the answer."""
    try:
        call.completion()
    except RefusedError as error:
        return error.status
    return 200


@pytest.mark.parametrize("num_tokens", [31, 32, 64, 65, 1000])
def test_decode_says_what_it_says_alone(pair: Cluster, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, seed=num_tokens)
    before = pair.moved()

    tokens = pair.handoff(prompt)

    assert tokens == pair.alone(prompt)
    assert pair.moved() > before


def test_a_request_with_a_wrong_ticket_is_an_error(pair: Cluster) -> None:
    prompts = {kind: prompt_of(200, seed=100 + number) for number, kind in enumerate(WRONG)}
    wrong = {kind: WRONG[kind](pair.ticket(prompt)) for kind, prompt in prompts.items()}

    statuses = {kind: status(pair.begin(prompts[kind], wrong[kind])) for kind in WRONG}

    assert statuses == dict.fromkeys(WRONG, 500)


def test_a_stream_with_a_wrong_ticket_ends_with_an_error(pair: Cluster) -> None:
    wrong = {"do_remote_prefill": True}

    call = pair.begin(prompt_of(200, seed=200), wrong, stream=True)

    with pytest.raises(RefusedError):
        list(call.stream())


def test_a_request_whose_offer_has_expired_is_an_error(pair: Cluster) -> None:
    prompt = prompt_of(200, seed=201)
    ticket = pair.ticket(prompt)
    wait_until(pair.prefill_agent.idle, "the offer has expired")
    wait_until(lambda: pair.prefill.blocks_in_use() == 0, "its blocks are vLLM's again")

    with pytest.raises(RefusedError):
        pair.redeem(prompt, ticket)


def test_a_request_whose_prefill_agent_is_killed_during_its_fetch_is_an_error(
    pair: Cluster,
) -> None:
    call = pair.stuck(prompt_of(400, seed=202))

    pair.prefill_agent.kill()

    with pytest.raises(RefusedError) as refused:
        call.completion()
    assert refused.value.status == 500
    pair.prefill_agent.start()
    works_again(pair, seed=2000)


def test_a_request_that_fails_does_not_disturb_those_beside_it(pair: Cluster) -> None:
    prompts = [prompt_of(200 + number, seed=300 + number) for number in range(6)]
    handed = [pair.soon(prompt) for prompt in prompts]
    wrong = pair.begin(prompt_of(200, seed=399), {"do_remote_prefill": True})

    said = [future.result() for future in handed]

    with pytest.raises(RefusedError):
        wrong.completion()
    assert said == [pair.alone(prompt) for prompt in prompts]


def test_a_request_without_a_ticket_is_served(pair: Cluster) -> None:
    prompt = prompt_of(200, seed=203)

    tokens = pair.redeem(prompt, None)

    assert tokens == pair.alone(prompt)
