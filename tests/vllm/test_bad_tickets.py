"""A ticket that is not right: decode computes the prompt itself, says why in its log, and goes on.

The offers of such tickets are withdrawn by right ones, so that nothing is left of a test.
"""

import pytest

from tests.vllm.clusters import Cluster, prompt_of
from tests.vllm.shapes import UP
from tests.vllm.tickets import WRONG, lacking

SHAPE = UP


def num_completed(pair: Cluster) -> float:
    """Handoffs whose KV counts: blocks that a ticket names are read before its secret is shown."""
    return pair.decode_agent.metric("handoffs_total", outcome="completed")


@pytest.mark.parametrize("kind", WRONG)
def test_decode_computes_the_prompt_of_a_wrong_ticket(pair: Cluster, kind: str) -> None:
    prompt = prompt_of(200, seed=list(WRONG).index(kind))
    ticket = pair.ticket(prompt)
    before, logged = num_completed(pair), pair.decode.trouble()

    tokens = pair.redeem(prompt, WRONG[kind](ticket), cache_salt=kind)

    assert tokens == pair.alone(prompt)
    assert num_completed(pair) == before
    assert len(pair.decode.trouble()) > len(logged)
    pair.redeem(prompt, ticket)


def test_decode_computes_the_prompt_of_a_ticket_that_lacks_any_of_its_fields(
    pair: Cluster,
) -> None:
    prompt = prompt_of(200, seed=100)
    ticket = pair.ticket(prompt)
    before = pair.moved()

    said = [
        pair.redeem(prompt, wrong, cache_salt=str(number))
        for number, wrong in enumerate(lacking(ticket))
    ]

    assert said == [pair.alone(prompt)] * len(lacking(ticket))
    assert pair.moved() == before
    pair.redeem(prompt, ticket)


def test_decode_computes_the_prompt_of_a_ticket_that_was_redeemed_before(pair: Cluster) -> None:
    prompt = prompt_of(200, seed=101)
    ticket = pair.ticket(prompt)
    pair.redeem(prompt, ticket)
    before = pair.moved()

    tokens = pair.redeem(prompt, ticket, cache_salt="again")

    assert tokens == pair.alone(prompt)
    assert pair.moved() == before


@pytest.mark.parametrize("num_tokens", [0, 1, 199, 201, 1 << 20])
def test_a_ticket_that_lies_about_its_tokens_makes_no_wrong_ones(
    pair: Cluster, num_tokens: int
) -> None:
    prompt = prompt_of(200, seed=300 + num_tokens)
    ticket = pair.ticket(prompt)

    tokens = pair.redeem(prompt, {**ticket, "remote_num_tokens": num_tokens}, cache_salt="a lie")

    assert tokens == pair.alone(prompt)
    pair.redeem(prompt, ticket)


@pytest.mark.parametrize("more", [1, 31, 400])
def test_a_decode_prompt_longer_than_what_was_prefilled_is_served(pair: Cluster, more: int) -> None:
    prompt = prompt_of(300 + more, seed=200 + more)
    ticket = pair.ticket(prompt[:300])

    tokens = pair.redeem(prompt, ticket)

    assert tokens == pair.alone(prompt)


def test_a_decode_prompt_shorter_than_what_was_prefilled_is_served(pair: Cluster) -> None:
    prompt = prompt_of(300, seed=201)
    ticket = pair.ticket(prompt)

    tokens = pair.redeem(prompt[:200], ticket)

    assert tokens == pair.alone(prompt[:200])


def test_another_prompt_than_what_was_prefilled_is_not_read_as_if_it_were(pair: Cluster) -> None:
    prompt = prompt_of(300, seed=202)
    ticket = pair.ticket(prompt_of(300, seed=203))

    tokens = pair.redeem(prompt, ticket)

    assert tokens == pair.alone(prompt)


def test_a_ticket_sent_to_the_prefill_side_is_no_harm(pair: Cluster) -> None:
    prompt = prompt_of(200, seed=204)
    ticket = pair.ticket(prompt)

    answer = pair.prefill.complete(prompt, 3, kv_transfer_params=ticket, cache_salt="other")

    assert answer.tokens == pair.alone(prompt)[:3]
    pair.redeem(prompt, ticket)


def test_a_request_to_prefill_for_another_sent_to_decode_is_no_harm(pair: Cluster) -> None:
    prompt = prompt_of(200, seed=205)

    tokens = pair.redeem(prompt, {"do_remote_decode": True})

    assert tokens == pair.alone(prompt)
