"""Prefill engines get their blocks back before decode reads, as the option ``park`` says."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.scheduled import (
    LARGER,
    LENGTH,
    SMALLER,
    TO_DECODE,
    EngineOf,
    pair_of,
    prompt_of,
    what_follows,
)
from tests.support.agents import Agents, agents_ended

if TYPE_CHECKING:
    from tests.e2e.vllm.scheduled import Pair, Scheduled

NUM_QUEUED = 16
PROMPTS = [prompt_of(LENGTH, seed) for seed in range(NUM_QUEUED)]
NUM_FITTING = 42 // (LENGTH // SMALLER)
"""Prompts in the blocks of a prefill engine with room for one longest request."""


@pytest.fixture(scope="module")
def shared_agents() -> Iterator[Agents]:
    """The pool has room for all prompts, and the agent alone parks none."""
    pool = {"park_bytes": 64 << 20, "park_after_s": 3600.0}
    with agents_ended(Agents) as agents:
        agents.both(prefill=pool)
        yield agents


def num_parked(engines: "Pair") -> int:
    return int(engines.agents.all[0].status()["counts"]["parked_offers"])


def decoded(decode: "Scheduled", prefilled: list[Any]) -> list[list[int]]:
    requests = zip(PROMPTS, prefilled, strict=False)
    answers = [decode.ask(prompt, 3, params) for prompt, params in requests]
    decode.until_ended(*answers)
    assert decode.figures["loads"] == len(prefilled) * ["completed"]
    return [answer.tokens for answer in answers]


def test_prefill_that_lacks_blocks_goes_on_while_decode_reads_nothing(
    agents: Agents, engine_of: EngineOf
) -> None:
    assert NUM_FITTING < NUM_QUEUED // 2
    with pair_of(agents, engine_of, num_requests=1) as engines:
        answers = [engines.prefill.ask(prompt, 1, TO_DECODE) for prompt in PROMPTS]
        engines.prefill.until_ended(*answers)
        parked = num_parked(engines)

        assert NUM_QUEUED - NUM_FITTING <= parked < NUM_QUEUED
        assert set(engines.prefill.figures["offers"]) == {"parked"}
        wanted = [what_follows(prompt, 3) for prompt in PROMPTS]
        assert decoded(engines.decode, [answer.params for answer in answers]) == wanted
        assert num_parked(engines) == 0


@pytest.mark.parametrize("park", ["always", "never"])
def test_offers_are_parked_always_or_never(agents: Agents, engine_of: EngineOf, park: str) -> None:
    with pair_of(agents, engine_of, num_requests=1, park=park) as engines:
        prompts = PROMPTS[:NUM_FITTING]
        answers = [engines.prefill.ask(prompt, 1, TO_DECODE) for prompt in prompts]
        engines.prefill.until_ended(*answers)
        if park == "always":
            engines.prefill.until_all_free()
        late = engines.prefill.ask(PROMPTS[-1], 1, TO_DECODE)
        for _ in range(50):
            engines.prefill.step()

        assert late.ended is (park == "always")
        assert num_parked(engines) == (NUM_FITTING + 1 if park == "always" else 0)
        wanted = [what_follows(prompt, 3) for prompt in prompts]
        assert decoded(engines.decode, [answer.params for answer in answers]) == wanted
        engines.prefill.until_ended(late)
        assert late.params is not None
        engines.decode.answer(PROMPTS[-1], 3, late.params)


def test_parked_offers_outlive_their_engine(agents: Agents, engine_of: EngineOf) -> None:
    prefill, decode = agents.all
    with engine_of((None, decode), LARGER) as reader:
        with engine_of((prefill, None), SMALLER, park="always") as source:
            prefilled = [source.offered(prompt, 1, TO_DECODE) for prompt in PROMPTS[:4]]
            source.until_all_free()
        assert decoded(reader, prefilled) == [what_follows(one, 3) for one in PROMPTS[:4]]
