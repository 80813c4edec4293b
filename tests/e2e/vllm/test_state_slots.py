"""States in vLLM's scheduler: each step finds the state of the tokens before it, cached or not."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM: make test-vllm")

from kvbus.integrations.vllm.stats import LOADS_FAILED
from tests.e2e.vllm.scheduled import (
    LONGEST,
    STEP_TOKENS,
    TO_DECODE,
    EngineOf,
    Pair,
    kv_of,
    prompt_of,
    what_follows,
)
from tests.support.agents import Agents

SIZE, NUM_TOKENS = 16, 5
MODES = [("none", "none"), ("align", "align"), ("none", "align"), ("align", "none")]


@pytest.fixture(params=MODES, ids="-".join)
def pair(agents: Agents, engine_of: EngineOf, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Engines with states and full attention; prompts are computed in chunks."""
    prefill, decode = agents.all
    with ExitStack() as stack:
        made = [
            stack.enter_context(
                engine_of(beside, SIZE, state_mode=mode, step_tokens=STEP_TOKENS + 8)
            )
            for beside, mode in zip(((prefill, None), (None, decode)), request.param, strict=True)
        ]
        yield Pair(agents, *made)


@pytest.mark.kind("states beside attention, with and without prefix caching", on="scheduler")
@pytest.mark.parametrize("num_tokens", [2, SIZE, SIZE + 1, 40, LONGEST - 9])
def test_decode_begins_with_the_state_of_prefill(pair: Pair, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)

    for _ in range(3):  # the prefix caches of both sides have it then
        answer = pair.decode.answer(prompt, NUM_TOKENS, pair.params(prompt))
        assert answer.tokens == what_follows(prompt, NUM_TOKENS)

    assert pair.decode.wrong == pair.prefill.wrong == []
    pair.decode.until_all_free()
    pair.prefill.until_all_free()


def test_slots_behind_loaded_tokens_are_zero(pair: Pair) -> None:
    """vLLM zeroes no block that is loaded, and what states left there may be no number."""
    prompt = prompt_of(40)
    pair.decode.answer(prompt, NUM_TOKENS, pair.params(prompt))

    memory, begins = pair.decode.memory[0], int(kv_of(prompt)[2 * SIZE])
    (block,) = (memory[:, 0, 0, 0, 0] == begins).nonzero().flatten().tolist()
    assert not memory[block, :, len(prompt) - 2 * SIZE + NUM_TOKENS :].any()


def test_state_of_a_whole_prompt_is_not_loaded(pair: Pair) -> None:
    """Decode computes the last token, and has no state of the tokens before it."""
    params = pair.params(prompt_of(40))

    answer = pair.decode.answer(prompt_of(39), NUM_TOKENS, params)

    assert answer.tokens == what_follows(prompt_of(39), NUM_TOKENS)
    assert answer.num_computed == 39
    assert not pair.decode.figures[LOADS_FAILED]
    assert pair.decode.wrong == []


def test_named_offer_has_the_state_once_it_is_whole(pair: Pair) -> None:
    name, prompt = uuid.uuid4().hex, prompt_of(100)
    meets = {"transfer_id": name, "endpoint": pair.agents.all[0].peer}
    pair.decode.answer(prompt_of(3, seed=5), 1)
    answer = pair.decode.ask(prompt, NUM_TOKENS, {"do_remote_prefill": True, "rendezvous": meets})
    pair.decode.step()

    pair.prefill.answer(prompt, 1, {**TO_DECODE, "transfer_id": name})
    pair.decode.until_ended(answer)

    assert answer.tokens == what_follows(prompt, NUM_TOKENS)
    assert answer.num_computed == 1
    assert pair.decode.wrong == []
