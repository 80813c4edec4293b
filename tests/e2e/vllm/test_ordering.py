"""vLLM's scheduler is ahead of its GPU: right tokens with the numbers of steps, wrong ones without.

A step's work is late where a test runs it after vLLM has its output.
"""

import time
from statistics import median

import pytest

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from kvbus.integrations.vllm.steps import Steps
from tests.e2e.vllm.scheduled import (
    LENGTH,
    PROMPT,
    TO_DECODE,
    WITHIN_S,
    Pair,
    prompt_of,
)
from tests.support.agents import AgentProcess, wait_until

BY_ORDER = pytest.mark.parametrize("in_order", [True, False], indirect=True)


@pytest.fixture
def in_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Without order, nothing waits for a number."""
    if not request.param:
        monkeypatch.setattr(Steps, "after", lambda *_: 0)
    return bool(request.param)


def wait_parked(agent: AgentProcess) -> None:
    wait_until(lambda: agent.status()["counts"]["waiting_requests"], "a request waits", WITHIN_S)


@BY_ORDER
@pytest.mark.parametrize("is_named", [False, True])
def test_tokens_of_a_late_step_are_loaded_after_it(
    engines: Pair, in_order: bool, is_named: bool
) -> None:
    prefill, decode = engines.prefill, engines.decode
    to_decode, to_prefill = engines.awaiting() if is_named else (None, TO_DECODE)
    offers = prefill.ask(PROMPT, 1, to_prefill)
    steps = [prefill.schedule() for _ in range(2)]
    for step in steps:
        prefill.hear(step)
    assert offers.ended
    loads = decode.ask(PROMPT, 3, to_decode or offers.params)
    if in_order:
        wait_parked(engines.agents.all[0])
        for _ in range(3):
            decode.step()
        assert not loads.tokens
    else:
        decode.until_ended(loads)
    for step in steps:
        prefill.run(step)
    decode.until_ended(loads)
    assert loads.num_computed == 1
    assert (decode.wrong == []) is in_order
    for engine in (prefill, decode):  # prefill's cache has tokens before they are computed
        engine.wrong.clear()


@BY_ORDER
def test_late_step_does_not_write_over_what_is_loaded(engines: Pair, in_order: bool) -> None:
    """The last step of a request may write to blocks that vLLM has given to a load."""
    decode, agent = engines.decode, engines.agents.all[1]
    name = f"late-{in_order}"
    params = engines.params(name=name)
    other = decode.ask(prompt_of(LENGTH, 1), 3)
    late = decode.schedule()
    loads = decode.ask(PROMPT, 3, params)
    step = decode.schedule()
    if in_order:
        wait_parked(agent)
    else:
        agent.says("handoff.completed", request_id=name)
    tables = decode.scheduler.kv_cache_manager.get_block_ids(decode.requests[-1].request_id)
    for memory, ids in zip(decode.memory, tables, strict=True):
        memory[ids] = 0
    decode.compute(late)
    decode.compute(step)
    decode.until_ended(loads, other)
    assert loads.num_computed == 1
    assert (decode.wrong == []) is in_order
    decode.wrong.clear()


def test_numbers_cost_microseconds_a_step(engines: Pair) -> None:
    decode, costs = engines.decode, list[float]()
    asked = decode.ask(PROMPT, 64)
    while not asked.ended:
        step = decode.schedule()
        decode.compute(step)
        since = time.perf_counter()
        decode.worker.wait_for_save()
        costs.append(time.perf_counter() - since)
    assert median(costs) < 100e-6


def test_step_of_every_kind_is_recorded(engines: Pair) -> None:
    """Steps without tokens, too: a load may wait for the number of any step."""
    decode = engines.decode
    steps = decode.scheduler.connector._steps
    for _ in range(3):
        decode.step()
        assert steps.after(steps.latest) == 0
    decode.answer(PROMPT, 2)
    assert steps.after(steps.latest) == 0
    late = decode.schedule()
    assert steps.after(steps.latest) == steps.latest * 512
    decode.compute(late)
    assert steps.after(steps.latest) == 0
