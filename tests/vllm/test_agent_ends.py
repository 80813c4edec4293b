"""Agents that end under running servers: tokens stay right, and handoffs come back with them."""

import signal

from tests.agents import wait_until
from tests.vllm.clusters import Cluster, prompt_of, works_again
from tests.vllm.halting import halted
from tests.vllm.shapes import UP

SHAPE = UP


def test_after_a_prefill_agent_killed_during_a_fetch_decode_computes_the_prompt(
    pair: Cluster,
) -> None:
    prompt = prompt_of(400, seed=1)
    call = pair.stuck(prompt)

    pair.prefill_agent.kill()

    assert call.completion().tokens == pair.alone(prompt)
    pair.prefill_agent.start()
    works_again(pair, seed=1000)


def test_after_a_decode_agent_killed_during_a_fetch_decode_computes_the_prompt(
    pair: Cluster,
) -> None:
    prompt = prompt_of(400, seed=2)
    call = pair.stuck(prompt)

    pair.decode_agent.kill()
    pair.prefill_agent.signal(signal.SIGCONT)

    assert call.completion().tokens == pair.alone(prompt)
    pair.decode_agent.start()
    works_again(pair, seed=2000)


def test_a_prefill_agent_that_answers_no_more_has_decode_compute_the_prompt(
    pair: Cluster,
) -> None:
    prompt = prompt_of(400, seed=3)
    ticket = pair.ticket(prompt)

    with halted([pair.prefill_agent.pid]):
        tokens = pair.redeem(prompt, ticket)

    assert tokens == pair.alone(prompt)


def test_a_prefill_agent_killed_under_many_handoffs_never_makes_wrong_tokens(
    pair: Cluster,
) -> None:
    prompts = [prompt_of(1500, seed=300 + number) for number in range(8)]
    said = [pair.soon_if_offered(prompt) for prompt in prompts]
    wait_until(pair.under_way, "a fetch has begun")

    pair.prefill_agent.kill()

    assert [future.result() for future in said] == [pair.alone(prompt) for prompt in prompts]
    pair.prefill_agent.start()
    works_again(pair, seed=3000)


def test_an_offer_whose_agent_was_killed_holds_no_blocks(pair: Cluster) -> None:
    pair.ticket(prompt_of(400, seed=4))

    pair.prefill_agent.kill()

    wait_until(lambda: pair.prefill.blocks_in_use() == 0, "the offer's blocks are free")
    pair.prefill_agent.start()
    works_again(pair, seed=4000)


def test_requests_are_served_while_there_is_no_prefill_agent(pair: Cluster) -> None:
    prompt = prompt_of(250, seed=5)
    pair.prefill_agent.kill()

    answer = pair.prefill_answer(prompt)

    assert pair.redeem(prompt, answer.params) == pair.alone(prompt)
    pair.prefill_agent.start()
    works_again(pair, seed=5000)


def test_requests_are_served_while_there_is_no_decode_agent(pair: Cluster) -> None:
    prompt = prompt_of(250, seed=6)
    pair.decode_agent.kill()

    tokens = pair.handoff(prompt)

    assert tokens == pair.alone(prompt)
    pair.decode_agent.start()
    works_again(pair, seed=6000)


def test_a_ticket_from_before_its_agent_was_killed_has_decode_compute_the_prompt(
    pair: Cluster,
) -> None:
    prompt = prompt_of(250, seed=7)
    ticket = pair.ticket(prompt)
    pair.prefill_agent.kill()
    pair.prefill_agent.start()

    tokens = pair.redeem(prompt, ticket)

    assert tokens == pair.alone(prompt)
    works_again(pair, seed=7000)
