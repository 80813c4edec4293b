"""Small blocks to large ones, prompts cut into chunks and cached: whatever happens to a handoff,
decode says what it says alone, and nothing is left of it.
"""

import signal
from functools import partial
from itertools import count

import pytest

from tests.e2e.vllm.calls import RefusedError
from tests.e2e.vllm.clusters import (
    CHUNK_TOKENS,
    LARGER,
    SETTLES_WITHIN_S,
    SMALLER,
    Cluster,
    prompt_of,
    works_again,
)
from tests.e2e.vllm.servers import VllmServer
from tests.e2e.vllm.tickets import WRONG
from tests.support.agents import wait_until

CLUSTER = "up"
LENGTHS = (1, SMALLER - 1, SMALLER, LARGER, LARGER + 1, CHUNK_TOKENS + 7, 7 * CHUNK_TOKENS + 7)


@pytest.mark.kind("full attention (MHA, GQA)", on="servers")
@pytest.mark.parametrize("pair", [False], indirect=True, ids=["without agents"])
def test_servers_serve_before_agents_start_and_use_them_later(pair: Cluster) -> None:
    prompt, seeds = prompt_of(250, seed=1), count(1000)
    logged = [pair.prefill.trouble(), pair.decode.trouble()]

    tokens = pair.handoff(prompt)

    assert tokens == pair.alone(prompt)
    assert all(logged)
    pair.agents.start(pair.prefill_agent)
    wait_until(lambda: pair.params(prompt_of(100, next(seeds))), "an offer", SETTLES_WITHIN_S)
    pair.agents.start(pair.decode_agent)
    works_again(pair, seed=2000)


@pytest.mark.parametrize("at_once", [False, True], ids=["ticket", "at once"])
def test_decode_says_what_it_says_alone(pair: Cluster, at_once: bool) -> None:
    """An offer of which both servers know grows with each step of prefill."""
    prompts = [prompt_of(length, seed=10 * length + at_once) for length in LENGTHS]
    before = pair.decode_agent.metric("handoffs_total", outcome="completed")

    if at_once:
        calls = [pair.meet(prompt) for prompt in prompts]
        said = [decode.completion().tokens for decode, _ in calls]
        params = [prefill.completion().params for _, prefill in calls]
        ids = [each["ticket"]["offer_id"] for each in params if each is not None]
        histories = [pair.prefill_agent.status(offer_id=one)["history"] for one in ids]
        assert len(ids) == len(prompts)
        assert sum("ExtendOffer" in step for step in histories[-1]) >= 6
    else:
        said = [one.result() for one in [pair.soon(prompt) for prompt in prompts]]

    assert said == [pair.alone(prompt) for prompt in prompts]
    pair.moved()
    after = pair.decode_agent.metric("handoffs_total", outcome="completed")
    assert after >= before + len(prompts)
    assert pair.decode_agent.says("handoff.completed")[-1]["path"] == "mapped"


def figure(server: VllmServer, name: str, **labels: str) -> float:
    """One on the page, which is as of the last step."""
    server.complete([1], 1)
    return server.metric(f"kvbus_{name}", **labels)


def test_wrong_ticket_prompt_is_computed_logged_and_on_metrics(
    pair: Cluster,
) -> None:
    figures = [
        partial(figure, pair.prefill, "offers_total", outcome="completed"),
        partial(figure, pair.decode, "loads_total", outcome="completed"),
        partial(figure, pair.decode, "load_stage_seconds_count", stage="reading"),
        partial(figure, pair.decode, "loads_failed_total", stage="requested"),
    ]
    before, logged = [one() for one in figures], len(pair.decode.trouble())
    prompt, wrong = prompt_of(200, seed=50), WRONG["of an endpoint that is none"]

    said = [
        pair.redeem(prompt, wrong(pair.ticket(prompt)), cache_salt="wrong"),
        pair.handoff(prompt, cache_salt="right"),
    ]

    def have_grown() -> bool:
        return all(one() > was for one, was in zip(figures, before, strict=True))

    assert said == 2 * [pair.alone(prompt)]
    assert len(pair.decode.trouble()) > logged
    wait_until(have_grown, "all figures have grown", SETTLES_WITHIN_S)


def test_request_without_images_of_ticket_is_error_not_computed(
    pair: Cluster,
) -> None:
    """No model here takes images: the params name some of a prompt that has none."""
    prompt = prompt_of(200, seed=60)
    ticket = pair.ticket(prompt)

    with pytest.raises(RefusedError) as refused:
        pair.redeem(prompt, {**ticket, "images": "b" * 32})

    assert refused.value.status == 500
    assert pair.redeem(prompt, ticket) == pair.alone(prompt)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_survive_kill_and_restart_of_agent(pair: Cluster, role: str) -> None:
    prompts = [prompt_of(400, seed=90 + 10 * len(role) + number) for number in range(4)]
    killed = pair.prefill_agent if role == "prefill" else pair.decode_agent
    calls = pair.stuck(prompts)

    killed.kill()
    killed.start()

    if role == "decode":
        pair.prefill_agent.signal(signal.SIGCONT)
    said = [call.completion().tokens for call in calls]
    assert said == [pair.alone(prompt) for prompt in prompts]
    works_again(pair, seed=3000 + 1000 * len(role))
