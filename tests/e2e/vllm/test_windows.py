"""Sliding windows, whatever the block sizes: vLLM reads no KV that nobody has written.

Not in the request that was loaded, and not in one that finds its blocks in the prefix cache.
"""

import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.scheduled import (
    LONGEST,
    TO_DECODE,
    EngineOf,
    Scheduled,
    prompt_of,
    what_follows,
)
from tests.support.agents import Agents
from tests.support.examples import num_examples

TALKS = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 1, "decoder_kv_blocks_share": 1.0}
SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
SOME = settings(max_examples=num_examples(40), suppress_health_check=SLOW)
SIZES = st.integers(1, 10).map(lambda number: 4 * number)
WINDOWS = st.integers(2, 60)
LENGTHS = st.integers(2, LONGEST)


def prefilled(
    engine: Scheduled,
    prompt: Sequence[int],
    asks: Mapping[str, Any] = TO_DECODE,
    meets_at: str | None = None,
) -> dict[str, Any] | None:
    """The params of the decode request, which know of no ticket if the two are to meet."""
    if meets_at is None:
        return engine.answer(prompt, 1, asks).params
    name = uuid.uuid4().hex
    engine.answer(prompt, 1, {**asks, "transfer_id": name})
    return {"do_remote_prefill": True, "rendezvous": {"transfer_id": name, "endpoint": meets_at}}


@dataclass(frozen=True)
class Handoff:
    """Block sizes, and a prompt that is loaded; ``common`` tokens of it begin other prompts, too.

    These come ``beside`` it or after it.
    """

    window: int
    theirs: int
    ours: int
    num_tokens: int
    num_said: int
    common: int
    num_requests: int = 8
    has_full: bool = True
    at_once: bool = False
    beside: bool = False


@dataclass(frozen=True)
class Conversation:
    """Block sizes of three engines, the first prompt, its answer, and what is new in the next."""

    window: int
    sizes: tuple[int, int, int]
    num_tokens: int
    num_said: int
    num_new: int
    at_once: bool = False


HANDOFFS = st.builds(
    Handoff,
    window=WINDOWS,
    theirs=SIZES,
    ours=SIZES,
    num_tokens=LENGTHS,
    num_said=st.integers(1, 40),
    common=LENGTHS,
    num_requests=st.sampled_from([2, 8]),
    has_full=st.booleans(),
    at_once=st.booleans(),
    beside=st.booleans(),
)
CONVERSATIONS = st.builds(
    Conversation,
    window=WINDOWS,
    sizes=st.tuples(SIZES, SIZES, SIZES),
    num_tokens=LENGTHS,
    num_said=st.integers(2, 40),
    num_new=st.integers(0, 30),
    at_once=st.booleans(),
)


@SOME
@given(HANDOFFS)
@example(Handoff(40, 8, 16, num_tokens=98, num_said=2, common=90, beside=True))
@example(Handoff(10, 8, 40, num_tokens=60, num_said=40, common=60, has_full=False))
def test_nothing_is_read_that_nobody_wrote(
    shared_agents: Agents, engine_of: EngineOf, case: Handoff
) -> None:
    """The last of the prompts is loaded behind what the cache has of it."""
    offering, loading = shared_agents.all
    prompt, said = prompt_of(case.num_tokens), case.num_said
    alike = [[*prompt[: case.common], *prompt_of(30, seed)] for seed in (1, 2)]
    ours = {"of": case.window, "has_full": case.has_full}
    with (
        engine_of((offering, None), case.theirs, **ours) as prefill,
        engine_of((None, loading), case.ours, num_requests=case.num_requests, **ours) as decode,
    ):
        meets_at = offering.peer if case.at_once else None
        first = decode.ask(prompt, said, prefilled(prefill, prompt, meets_at=meets_at))
        if not case.beside:
            decode.until_ended(first)
        others = [decode.ask(prompt, said), decode.ask(alike[0])]
        decode.until_ended(first, *others)
        last = decode.answer(alike[1], 2, prefilled(prefill, alike[1]))

        assert decode.wrong == prefill.wrong == []
        assert first.tokens == others[0].tokens == what_follows(prompt, said)
        assert others[1].tokens == what_follows(alike[0], 2)
        assert last.tokens == what_follows(alike[1], 2)


@SOME
@given(CONVERSATIONS)
@example(Conversation(16, (8, 32, 32), num_tokens=60, num_said=2, num_new=5))
@example(Conversation(16, (32, 8, 32), num_tokens=60, num_said=2, num_new=6))
@example(Conversation(16, (32, 8, 32), num_tokens=60, num_said=2, num_new=6, at_once=True))
def test_nothing_is_read_that_nobody_wrote_in_a_conversation(
    shared_agents: Agents, engine_of: EngineOf, case: Conversation
) -> None:
    """From the first engine to the second, its answer to the third, the next turn to the first."""
    prompt = prompt_of(case.num_tokens)
    with ExitStack() as stack:
        engines = [
            stack.enter_context(engine_of(shared_agents.all, size, of=case.window, **TALKS))
            for size in case.sizes
        ]
        answer = engines[1].answer(prompt, case.num_said, prefilled(engines[0], prompt))
        turn = [*prompt, *answer.tokens, *prompt_of(case.num_new, 3)]
        meets_at = shared_agents.all[0].peer if case.at_once else None
        asks = {**TO_DECODE, **(answer.params or {})}
        last = engines[0].answer(turn, 2, prefilled(engines[2], turn, asks, meets_at))
        again = [engine.answer(turn) for engine in engines]

        assert [engine.wrong for engine in engines] == [[], [], []]
        assert answer.tokens == what_follows(prompt, case.num_said)
        assert [each.tokens for each in (last, *again)] == 4 * [what_follows(turn, 2)]


@pytest.mark.parametrize(("theirs", "num_found"), [(16, 96), (32, 96), (8, 0)])
@pytest.mark.parametrize("at_once", [False, True], ids=["ticket", "at once"])
def test_blocks_that_prefill_has_whole_are_found_again(
    agents: Agents, engine_of: EngineOf, theirs: int, num_found: int, at_once: bool
) -> None:
    """Token 96 needs 39 tokens before it. Of these 57 to 63 are in a block that starts at 48."""
    offering, loading = agents.all
    prompt = prompt_of(97)
    with (
        engine_of((offering, None), theirs, of=40) as prefill,
        engine_of((None, loading), 16, of=40) as decode,
    ):
        meets_at = offering.peer if at_once else None
        decode.answer(prompt, 2, prefilled(prefill, prompt, meets_at=meets_at))

        again = decode.answer(prompt)

        assert again.num_found == num_found
        assert again.tokens == what_follows(prompt, 2)


def test_prompt_that_found_block_with_gap_is_looked_up_again(
    agents: Agents, engine_of: EngineOf
) -> None:
    """Its load has ended in this pass, but its request waits for a LoRA: vLLM looks for others."""
    offering, loading = agents.all
    prompt = prompt_of(98)
    with (
        engine_of((offering, None), 8, of=40) as prefill,
        engine_of((None, loading), 16, of=40) as decode,
    ):
        first = decode.ask(prompt, 2, prefilled(prefill, prompt))
        loaded, other = decode.requests[-1], decode.request(prompt)
        cache, connector = decode.scheduler.kv_cache_manager, decode.scheduler.connector
        decode.until(lambda: loaded.request_id in decode.scheduler.finished_recving_kv_req_ids)
        cache.cache_blocks(loaded, loaded.num_computed_tokens)
        found, asked = [], []
        for _ in range(2):
            found.append(cache.get_computed_blocks(other)[1])
            asked.append(connector.get_num_new_matched_tokens(other, found[-1]))
        decode.until_ended(first)

        assert found == [96, 0]
        assert asked == [(None, False), (0, False)]
        assert decode.wrong == []
