"""Conversations by vLLM's own scheduler and real agents, but no model: what decode keeps of an
answer, and what prefill loads of it for the next turn.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import RequestStatus

from tests.e2e.vllm.scheduled import (
    LARGER,
    PROMPT,
    SMALLER,
    Answer,
    EngineOf,
    Scheduled,
    prompt_of,
    what_follows,
)
from tests.e2e.vllm.tickets import WRONG
from tests.support.agents import Agents

ASKED = {"do_remote_prefill": False}
GOES_ON = {"do_remote_decode": True, "do_remote_prefill": False}
TALKS = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 1}
STREAMED = {"output_kind": RequestOutputKind.DELTA}
NUM_SAID = 10
SAID = [*PROMPT, *what_follows(PROMPT, NUM_SAID)]
NEW = [60, 61, 62]
NUM_BLOCKS = 177
"""Of a decode engine."""
NUM_KEPT = len(SAID) - 1
"""Nobody has computed the last token of an answer."""

Both = tuple[Scheduled, Scheduled]


@contextmanager
def talking(
    agents: Agents, engine_of: EngineOf, *, ttl_s: float = 60.0, share: float = 0.5, **theirs: Any
) -> Iterator[Both]:
    """One that prefills and one that decodes, which have read nothing wrong and hold nothing."""
    ours = {**TALKS, "decoder_kv_blocks_ttl": ttl_s, "decoder_kv_blocks_share": share}
    with (
        engine_of(agents.all, SMALLER, **{**TALKS, **theirs}) as prefill,
        engine_of(agents.all, LARGER, **ours) as decode,
    ):
        yield prefill, decode
        assert prefill.wrong == decode.wrong == []
        for engine in (prefill, decode):
            engine.until_all_free()


@pytest.fixture
def both(agents: Agents, engine_of: EngineOf) -> Iterator[Both]:
    """Engines whose answers wait for the next turn for long."""
    with talking(agents, engine_of) as made:
        yield made


def kept(both: Both, **fields: Any) -> dict[str, Any]:
    """The params of the next turn's prefill request, by decode."""
    return both[1].offered(PROMPT, NUM_SAID, ASKED, **fields)


def turn(both: Both, prompt: list[int], params: Mapping[str, Any], salt: str = "") -> Answer:
    """What prefill says to the next turn, whose answer by decode is right and not kept."""
    prefill, decode = both

    answer = prefill.answer(prompt, 1, params, cache_salt=salt)
    said = decode.answer(prompt, 2, answer.params, cache_salt=salt, sampling=STREAMED)

    assert said.tokens == what_follows(prompt, 2)
    return answer


def test_all_but_last_token_is_kept_for_while_and_vllm_rests(
    agents: Agents, engine_of: EngineOf
) -> None:
    with talking(agents, engine_of, ttl_s=2.0) as (prefill, decode):
        before = decode.num_free

        params = kept((prefill, decode))

        assert params["remote_num_tokens"] == NUM_KEPT
        assert {key: params[key] for key in GOES_ON} == GOES_ON
        assert decode.num_free < before
        assert not decode.scheduler.connector.has_pending_push_work()
        decode.until(lambda: decode.num_free == before)
        late = turn((prefill, decode), [*SAID, *NEW], params)
        assert late.num_computed == len(SAID) + len(NEW)


NOT_KEPT: Mapping[str, tuple[Mapping[str, Any] | None, Mapping[str, Any], str]] = {
    "not asked for": (None, {}, ""),
    "asked for nothing": ({}, {}, ""),
    "streamed": (ASKED, STREAMED, ""),
    "aborted": (ASKED, {}, "FINISHED_ABORTED"),
    "failed": (ASKED, {}, "FINISHED_ERROR"),
}


@pytest.mark.parametrize("how", NOT_KEPT)
def test_what_nobody_can_go_on_with_is_not_kept(both: Both, how: str) -> None:
    params, sampling, status = NOT_KEPT[how]
    _, decode = both

    answer = decode.ask(PROMPT, NUM_SAID, params, sampling=sampling)
    decode.until(lambda: len(answer.tokens) == NUM_SAID - bool(status))
    if status:
        decode.give_up(RequestStatus[status])
        decode.step()

    assert answer.params is None
    assert decode.num_free == decode.pool.num_gpu_blocks - 1


@pytest.mark.parametrize("num_kept", [0, 2])
def test_answers_hold_their_cache_share_and_oldest_goes_for_new(
    agents: Agents, engine_of: EngineOf, num_kept: int
) -> None:
    blocks_each = -(-len(SAID) // LARGER)
    share = (num_kept * blocks_each + 0.5) / NUM_BLOCKS
    with talking(agents, engine_of, share=share) as both:
        _, decode = both
        free, prompts = decode.num_free, [prompt_of(len(PROMPT), seed) for seed in (1, 2, 3)]

        kept = [decode.answer(prompt, NUM_SAID, ASKED).params for prompt in prompts]

        decode.until(lambda: free - decode.num_free == num_kept * blocks_each)
        assert [params is not None for params in kept] == 3 * [num_kept > 0]
        for number, params in enumerate(kept if num_kept else ()):
            prompt = [*prompts[number], *what_follows(prompts[number], NUM_SAID), *NEW]
            is_kept = number >= len(kept) - num_kept
            num_computed = 1 + len(NEW) if is_kept else len(prompt)
            assert turn(both, prompt, params or {}).num_computed == num_computed


def test_nothing_is_kept_unless_the_options_say_so(agents: Agents, engine_of: EngineOf) -> None:
    with engine_of((agents.all[0], None), LARGER) as decode:
        assert decode.answer(PROMPT, NUM_SAID, ASKED).params is None


@pytest.mark.parametrize(
    ("num_cached", "options", "num_computed"),
    [
        (0, {"kv_recompute_threshold": 1}, 1 + len(NEW)),
        (16, {"kv_recompute_threshold": NUM_KEPT - 16}, 1 + len(NEW)),
        (16, {"kv_recompute_threshold": NUM_KEPT - 16 + 1}, len(SAID) - 16 + len(NEW)),
        (56, {"kv_recompute_threshold": 2}, len(SAID) - 56 + len(NEW)),
        (0, {"bidirectional_kv_xfer": False}, len(SAID) + len(NEW)),
    ],
    ids=["all", "worth it", "not worth it", "cached", "may not load"],
)
def test_the_next_turn_loads_what_is_not_cached_and_worth_it(
    agents: Agents,
    engine_of: EngineOf,
    num_cached: int,
    options: Mapping[str, Any],
    num_computed: int,
) -> None:
    with talking(agents, engine_of, ttl_s=3.0, **options) as both:
        both[0].answer([*SAID[:num_cached], 1], 1)

        answer = turn(both, [*SAID, *NEW], kept(both))

        assert (answer.num_found, answer.num_computed) == (num_cached, num_computed)


@pytest.mark.parametrize("kind", ["with another secret", "without ticket", "without prompt_digest"])
def test_wrong_ticket_turn_is_computed_and_right_ticket_loads(both: Both, kind: str) -> None:
    params, prompt = kept(both), [*SAID, *NEW]

    wrong = turn(both, prompt, {**WRONG[kind](params), **GOES_ON}, salt="wrong")
    right = turn(both, prompt, params)

    assert (wrong.num_computed, right.num_computed) == (len(prompt), 1 + len(NEW))


@pytest.mark.parametrize("num_kept", [0, 30, NUM_KEPT - 1])
def test_a_turn_whose_past_was_changed_is_computed(both: Both, num_kept: int) -> None:
    params, prompt = kept(both), [*SAID[:num_kept], 99, *SAID[num_kept + 1 :], *NEW]

    changed = turn(both, prompt, params, salt="changed")
    right = turn(both, [*SAID, *NEW], params)

    assert (changed.num_computed, right.num_computed) == (len(prompt), 1 + len(NEW))


def test_answer_ended_by_stop_token_goes_on_without_new_tokens(both: Both) -> None:
    _, decode = both

    params = decode.offered(PROMPT, NUM_SAID + 9, ASKED, sampling={"stop_token_ids": SAID[-1:]})

    assert turn(both, SAID, params).num_computed == 1
