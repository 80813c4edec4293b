"""Agents end, hang, expire what they hold and come back: vLLM computes, and goes on with the next.

By vLLM's own scheduler and real agents; no token reads KV that is not its own, no block is left.
"""

import signal
import uuid
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import pytest

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.clusters import halted
from tests.e2e.vllm.scheduled import (
    LENGTH,
    PROMPT,
    SMALLER,
    TO_DECODE,
    WITHIN_S,
    EngineOf,
    Pair,
    pair_of,
    prompt_of,
    what_follows,
)
from tests.support.agents import Agents, wait_until

NUM_BEHIND = 100
"""Requests that would take longer than a test may, if vLLM waited a second for each."""
SEEDS = count(100)
BY_SIGNAL = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])


@pytest.fixture
def brief(agents: Agents, engine_of: EngineOf) -> Iterator[Pair]:
    """As `engines`, whose loads do not wait for the next agent for long."""
    with pair_of(agents, engine_of, fetch_timeout_s=4.0) as made:
        yield made


def hands_off_again(engines: Pair) -> None:
    """Return once prefill offers and decode loads; tokens are right all the while."""

    def loads() -> bool:
        prompt = prompt_of(LENGTH, seed=next(SEEDS))
        params = engines.prefill.answer(prompt, 1, TO_DECODE).params
        answer = engines.decode.answer(prompt, 3, params)
        assert answer.tokens == what_follows(prompt, 3)
        return (answer.num_found, answer.num_computed) == (0, 1)

    wait_until(loads, "a handoff", WITHIN_S)


def test_prefill_without_agent_keeps_offers_and_next_gets_rest(
    engines: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for the next agent once, and no longer than it may."""
    monkeypatch.setattr("kvbus.integrations.vllm.offers.AGENT_WITHIN_S", 1.0)
    offered = engines.params()
    engines.agents.all[0].kill()

    prompts = [prompt_of(LENGTH, seed) for seed in range(1, 5)]
    missed = [engines.prefill.answer(prompt, 1, TO_DECODE).params for prompt in prompts]

    assert missed == [None] * len(prompts)
    assert "its KV is not offered" in caplog.text
    prompt = prompt_of(LENGTH, seed=NUM_BEHIND)
    waits = engines.prefill.ask(prompt, 1, TO_DECODE)
    engines.prefill.step()
    engines.agents.all[0].start()
    wait_until(lambda: engines.num_offers == 2, "it is asked for what waits", WITHIN_S)
    engines.prefill.until_ended(waits)
    assert engines.decode.answer(prompt, 2, waits.params).num_computed == 1
    assert engines.decode.answer(PROMPT, 2, offered).num_computed == 1
    engines.prefill.until_all_free()
    assert "already offered" not in caplog.text


def test_request_ending_during_agent_restart_waits_for_ticket(
    engines: Pair,
) -> None:
    offered = engines.params()
    prefill = engines.agents.all[0]
    prefill.kill()
    prefill.launch()
    prompt = prompt_of(LENGTH, seed=1)

    params = engines.prefill.answer(prompt, 1, TO_DECODE).params

    prefill.wait_started()
    assert engines.decode.answer(prompt, 2, params).num_computed == 1
    assert engines.decode.answer(PROMPT, 2, offered).num_computed == 1


@BY_SIGNAL
def test_load_without_agent_is_computed_then_released_by_next(
    brief: Pair, how: signal.Signals
) -> None:
    prompts = [prompt_of(LENGTH, seed) for seed in range(4)]
    tickets = [brief.params(prompt) for prompt in prompts]
    decode = brief.agents.all[1]
    decode.signal(how)
    decode.exit_status()

    said = [brief.decode.answer(*each) for each in zip(prompts, [2] * 4, tickets, strict=True)]
    decode.start()

    assert [answer.tokens for answer in said] == [what_follows(prompt, 2) for prompt in prompts]
    assert [answer.num_computed for answer in said] == 4 * [LENGTH]
    brief.wait_no_offer()
    hands_off_again(brief)


@BY_SIGNAL
@pytest.mark.parametrize("does", ["loads", "releases"])
def test_load_lost_with_agent_is_computed_then_released_by_next(
    brief: Pair, does: str, how: signal.Signals
) -> None:
    decode, params = brief.agents.all[1], brief.params()
    with halted([brief.agents.all[0].pid]):
        answer = brief.decode.ask(PROMPT, 3, params)
        if does == "loads":
            brief.decode.step()
        else:
            brief.decode.give_up()
        wait_until(lambda: decode.status()["counts"]["fetches"], "the agent has begun")
        decode.signal(how)
        if how is signal.SIGTERM:
            wait_until(lambda: decode.status()["draining"], "it drains")
    decode.exit_status()
    if does == "loads":
        brief.decode.until_ended(answer)
        assert answer.tokens == what_follows(PROMPT, 3)

    decode.start()

    brief.wait_no_offer()
    hands_off_again(brief)


@pytest.mark.parametrize("is_named", [False, True], ids=["ticket", "at once"])
@pytest.mark.parametrize("what", ["restarts", "expires"])
def test_prompt_is_offered_anew_if_offer_ends_while_computed(
    agents: Agents, engine_of: EngineOf, what: str, *, is_named: bool
) -> None:
    options = {"offer_ttl_s": 3.0} if what == "expires" else {}
    with pair_of(agents, engine_of, **options) as engines:
        asks = engines.awaiting()[1] if is_named else TO_DECODE
        answer = engines.prefill.ask(PROMPT, 1, asks)
        engines.prefill.step()
        wait_until(lambda: engines.num_offers, "there is an offer")
        agents.all[0].skip_log()
        if what == "expires":
            agents.all[0].says("offer.released", outcome="expired")
        else:
            agents.all[0].kill()
            agents.all[0].start()
            agents.all[0].says("engine.ready")

        engines.prefill.until_ended(answer)

        loads = engines.decode.answer(PROMPT, 3, answer.params)
        assert (loads.num_computed, loads.tokens) == (1, what_follows(PROMPT, 3))


def test_requests_wait_once_for_hanging_agent_not_each(engines: Pair) -> None:
    with halted([engines.agents.all[0].pid]):
        answers = [
            engines.prefill.ask(prompt_of(20, seed), 1, TO_DECODE) for seed in range(NUM_BEHIND)
        ]

        engines.prefill.until_ended(*answers)

    assert [answer.params for answer in answers] == NUM_BEHIND * [None]
    hands_off_again(engines)


UNFIT: Mapping[str, tuple[tuple[int | None, int | None], Mapping[str, Any], str]] = {
    "a decode agent where one is to offer": ((1, None), {}, "a prefill agent is needed"),
    "a prefill agent where one is to load": ((None, 0), {}, "a decode agent is needed"),
    "both, exchanged": ((1, 0), {"fits": False}, "is for decode engines, not prefill"),
    "a decode agent of a producer": (
        (None, 1),
        {"fits": False, "kv_role": "kv_producer"},
        "is for decode engines, not prefill",
    ),
}
"""The agents to offer and to load with, options, and what is said of a handoff."""


@pytest.mark.parametrize("how", UNFIT)
def test_unfit_agents_are_not_used_and_log_says_which_are_needed(
    agents: Agents, engine_of: EngineOf, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    (offering, loading), options, said = UNFIT[how]
    beside = [None if place is None else agents.all[place] for place in (offering, loading)]
    meets = {"transfer_id": uuid.uuid4().hex, "endpoint": agents.all[0].peer}
    loads = {"do_remote_prefill": True, "rendezvous": meets}
    with engine_of(beside, SMALLER, **options) as engine:

        def is_said() -> bool:
            asks = loads if offering is None else TO_DECODE
            answer = engine.answer(prompt_of(20, seed=next(SEEDS)), 1, asks)
            assert answer.params is None
            return said in caplog.text

        wait_until(is_said, said)
