"""Small blocks to large ones, prompts cut into chunks and cached: whatever happens to a handoff,
decode says what it says alone, and nothing is left of it.
"""

import signal
import time
from collections.abc import Callable, Mapping
from itertools import count

import pytest

from tests.agents import wait_until
from tests.vllm.calls import RefusedError
from tests.vllm.clusters import (
    CHUNK_TOKENS,
    FOR_DECODE,
    LARGER,
    SETTLES_WITHIN_S,
    SMALLER,
    Cluster,
    halted,
    prompt_of,
    works_again,
)
from tests.vllm.servers import VllmServer
from tests.vllm.tickets import WRONG, unreachable

CLUSTER = "up"
LONG = 3000
LENGTHS = (1, SMALLER - 1, SMALLER, LARGER, LARGER + 1, CHUNK_TOKENS + 7, 7 * CHUNK_TOKENS + 7)
LOOKED_AT_S = 4.0
MOST_OF_A_CORE = 0.2


def test_servers_serve_before_their_agents_start_and_use_them_then(without_agents: Cluster) -> None:
    pair, seeds = without_agents, count(1000)
    prompt = prompt_of(250, seed=1)
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
    prompts = [prompt_of(length, seed=10 * length + at_once) for length in LENGTHS]
    before = pair.decode_agent.metric("handoffs_total", outcome="completed")

    if at_once:
        calls = [pair.meet(prompt) for prompt in prompts]
        said = [decode.completion().tokens for decode, _ in calls]
        assert [prefill.completion().params is not None for _, prefill in calls] == [True] * 7
    else:
        said = [one.result() for one in [pair.soon(prompt) for prompt in prompts]]

    assert said == [pair.alone(prompt) for prompt in prompts]
    pair.moved()
    after = pair.decode_agent.metric("handoffs_total", outcome="completed")
    assert after >= before + len(prompts)
    assert pair.decode_agent.says("handoff.completed")[-1]["path"] == "mapped"


def test_an_offer_grows_with_each_step_of_prefill(pair: Cluster) -> None:
    decode, prefill = pair.meet(prompt_of(12 * CHUNK_TOKENS + 7, seed=20))
    decode.completion()
    params = prefill.completion().params

    assert params is not None
    story = pair.prefill_agent.status(offer_id=params["ticket"]["offer_id"])["story"]
    assert sum("Extended" in step for step in story) >= 10


def test_a_stream_says_the_same_and_only_what_decode_has_not_cached_is_fetched(
    pair: Cluster,
) -> None:
    known = prompt_of(3 * LARGER, seed=30)
    pair.handoff([*known, 5])
    longer = [*known, *prompt_of(100, seed=31)]
    ticket, before = pair.ticket(longer), pair.decode.from_elsewhere()

    streamed = list(pair.begin(longer, ticket, stream=True).stream())

    assert 0 < pair.decode.from_elsewhere() - before <= 100
    assert streamed == pair.alone(longer)


@pytest.mark.parametrize(
    "wrong", [WRONG["with another secret"], unreachable], ids=["secret", "agent"]
)
def test_decode_computes_the_prompt_of_a_wrong_ticket_and_says_why(
    pair: Cluster, wrong: Callable[[Mapping[str, object]], object]
) -> None:
    prompt, logged = prompt_of(200, seed=50), len(pair.decode.trouble())
    ticket = pair.ticket(prompt)

    tokens = pair.redeem(prompt, wrong(ticket), cache_salt="wrong")
    right = pair.redeem(prompt, ticket, cache_salt="right")

    assert tokens == right == pair.alone(prompt)
    assert len(pair.decode.trouble()) > logged


def test_a_prefill_given_up_between_two_chunks_leaves_nothing(pair: Cluster) -> None:
    call = pair.prefill.begin(prompt_of(LONG, seed=60), 1, kv_transfer_params=FOR_DECODE)
    wait_until(pair.reading, "prefill has begun")

    call.abort()

    pair.check()


def test_a_decode_given_up_before_its_fetch_releases_the_prefill_side(pair: Cluster) -> None:
    prompt = prompt_of(300, seed=61)
    ticket = pair.ticket(prompt)

    with halted(pair.decode.pids("EngineCore")):
        pair.begin(prompt, ticket).abort()

    pair.check()


def test_a_decode_given_up_during_its_fetch_does_not_disturb_another(pair: Cluster) -> None:
    prompts = [prompt_of(400, seed=62), prompt_of(400, seed=63)]
    tickets = [pair.ticket(prompt) for prompt in prompts]

    with halted([pair.prefill_agent.pid]):
        calls = [pair.begin(*each) for each in zip(prompts, tickets, strict=True)]
        wait_until(lambda: pair.under_way() == len(calls), "both fetches have begun")
        calls[0].abort()

    assert calls[1].completion().tokens == pair.alone(prompts[1])


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_when_one_of_two_that_got_a_prompt_at_once_hangs_up_the_other_is_right(
    pair: Cluster, side: str
) -> None:
    prompt = prompt_of(12 * CHUNK_TOKENS + 7, seed=70 + len(side))
    decode, prefill = pair.meet(prompt)
    wait_until(lambda: pair.reading() and pair.under_way(), "both have begun")

    if side == "decode":
        decode.abort()
        prefill.completion()
    else:
        prefill.abort()
        assert decode.completion().tokens == pair.alone(prompt)

    pair.check()


def after_a_step(server: VllmServer, name: str, **labels: str) -> float:
    """A figure on the page, which is as of the last step."""
    server.complete([1], 1)
    return server.metric(name, **labels)


def test_loads_and_offers_are_on_the_pages_of_both_servers(pair: Cluster) -> None:
    prompt, offers = prompt_of(200, seed=80), {"outcome": "completed"}
    before = after_a_step(pair.prefill, "kvbus_offers_total", **offers)
    failed = after_a_step(pair.decode, "kvbus_loads_failed_total", stage="requested")

    pair.handoff(prompt)
    ticket = pair.ticket(prompt)
    pair.redeem(prompt_of(200, seed=81), ticket)  # of another prompt: refused
    pair.redeem(prompt, ticket)

    for server, name, labels, more in (
        (pair.prefill, "kvbus_offers_total", offers, before),
        (pair.decode, "kvbus_loads_failed_total", {"stage": "requested"}, failed),
    ):
        wait_until(lambda *_, a=(server, name), b=labels, c=more: after_a_step(*a, **b) > c, name)
    assert pair.decode.metric("kvbus_loads_total", outcome="completed") >= 1
    for stage in ("resolving", "reading", "confirming"):
        labels = {"stage": stage, "outcome": "completed"}
        assert pair.decode.metric("kvbus_load_stage_seconds_count", **labels) >= 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_after_an_agent_killed_during_a_fetch_decode_computes_the_prompt(
    pair: Cluster, role: str
) -> None:
    prompt = prompt_of(400, seed=90 + len(role))
    call = pair.stuck(prompt)
    killed = pair.prefill_agent if role == "prefill" else pair.decode_agent

    killed.kill()
    if killed is pair.decode_agent:
        pair.prefill_agent.signal(signal.SIGCONT)

    assert call.completion().tokens == pair.alone(prompt)
    killed.start()
    works_again(pair, seed=3000 + 1000 * len(role))


def test_a_prefill_agent_killed_under_many_handoffs_never_makes_wrong_tokens(
    pair: Cluster,
) -> None:
    prompts = [prompt_of(1000, seed=100 + number) for number in range(6)]
    said = [pair.soon(prompt) for prompt in prompts]
    wait_until(pair.under_way, "a fetch has begun")

    pair.prefill_agent.kill()

    assert [one.result() for one in said] == [pair.alone(prompt) for prompt in prompts]
    pair.prefill_agent.start()
    works_again(pair, seed=5000)


@pytest.mark.long
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_are_served_while_an_agent_is_not_there(pair: Cluster, role: str) -> None:
    prompts = [prompt_of(250, seed=110 + number) for number in range(2)]
    ticket = pair.ticket(prompts[0])
    killed = pair.prefill_agent if role == "prefill" else pair.decode_agent

    killed.kill()
    if role == "prefill":
        wait_until(lambda: not pair.prefill.blocks_in_use(), "the offer's blocks are free")
    said = [pair.redeem(prompts[0], ticket), pair.handoff(prompts[1])]
    killed.start()

    assert said == [pair.alone(prompt) for prompt in prompts]
    works_again(pair, seed=6000 + 1000 * len(role))


@pytest.mark.long
def test_what_prefill_refuses_decode_computes_at_its_deadline(pair: Cluster) -> None:
    prompt = prompt_of(250, seed=120)
    to_decode, to_prefill = pair.meeting()

    decode = pair.begin(prompt, to_decode)
    with pytest.raises(RefusedError):
        pair.prefill.complete(prompt, 1, kv_transfer_params=to_prefill, temperature=-1.0)

    assert decode.completion().tokens == pair.alone(prompt)


@pytest.mark.long
def test_more_requests_than_there_are_blocks_for_are_all_served(pair: Cluster) -> None:
    prompts = [prompt_of(2000, seed=130 + number) for number in range(12)]

    said = [one.result() for one in [pair.soon(prompt) for prompt in prompts]]

    assert said == [pair.alone(prompt) for prompt in prompts]


def test_a_server_with_offers_that_wait_for_their_readers_rests(pair: Cluster) -> None:
    pair.prefill_agent.kill()
    del pair.prefill_agent.settings["offer_ttl_s"]
    pair.prefill_agent.start()
    works_again(pair, seed=9000)
    prompts = [prompt_of(100, seed=140 + number) for number in range(8)]
    tickets = [pair.ticket(prompt) for prompt in prompts]

    def rests() -> bool:
        before = pair.prefill.cpu_s("VLLM::")
        time.sleep(LOOKED_AT_S)  # what is measured is what it does in this time
        return (pair.prefill.cpu_s("VLLM::") - before) / LOOKED_AT_S < MOST_OF_A_CORE

    wait_until(rests, "the server rests", SETTLES_WITHIN_S)
    said = [pair.redeem(*each) for each in zip(prompts, tickets, strict=True)]
    assert said == [pair.alone(prompt) for prompt in prompts]
