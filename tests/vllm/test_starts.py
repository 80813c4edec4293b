"""Servers that start before their agents, and servers whose models differ."""

import pytest

from tests.vllm.clusters import Cluster, offers_again, prompt_of, works_again
from tests.vllm.shapes import OTHERS, UP

SHAPE = UP


def test_servers_serve_before_their_agents_start_and_use_them_then(
    without_agents: Cluster,
) -> None:
    pair = without_agents
    prompt = prompt_of(250, seed=1)
    logged = [pair.prefill.trouble(), pair.decode.trouble()]

    tokens = pair.redeem(prompt, pair.prefill_answer(prompt).params)

    assert tokens == pair.alone(prompt)
    assert all(logged)
    pair.agents.start(pair.prefill_agent)
    offers_again(pair, seed=1000)
    pair.agents.start(pair.decode_agent)
    works_again(pair, seed=2000)


@pytest.mark.parametrize("pair", [OTHERS], ids=["others"], indirect=True)
def test_what_another_model_has_read_is_not_used(pair: Cluster) -> None:
    prompt = prompt_of(250, seed=2)
    ticket = pair.ticket(prompt)
    before = pair.moved()

    tokens = pair.redeem(prompt, ticket)

    assert tokens == pair.alone(prompt)
    assert pair.moved() == before
    assert pair.decode.trouble()
