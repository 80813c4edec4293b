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

from tests.agents import Agents, wait_until
from tests.vllm.scheduled import Answer, EngineOf, Scheduled, prompt_of, what_follows
from tests.vllm.tickets import WRONG

ASKED = {"do_remote_prefill": False}
GOES_ON = {"do_remote_decode": True, "do_remote_prefill": False}
TALKS = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 1}
SMALLER, LARGER = 8, 16
NUM_SAID = 10
PROMPT = prompt_of(48)
SAID = [*PROMPT, *what_follows(PROMPT, NUM_SAID)]
NEW = [60, 61, 62]
NUM_KEPT = len(SAID) - 1
"""Nobody has computed the last token of an answer."""

Engines = tuple[Scheduled, Scheduled]


@contextmanager
def engines(
    agents: Agents, engine_of: EngineOf, *, ttl_s: float = 60.0, **theirs: Any
) -> Iterator[Engines]:
    """One that prefills and one that decodes, which have read nothing wrong and hold nothing."""
    ours = {**TALKS, "decoder_kv_blocks_ttl": ttl_s}
    with (
        engine_of(agents.all, SMALLER, **{**TALKS, **theirs}) as prefill,
        engine_of(agents.all, LARGER, **ours) as decode,
    ):
        yield prefill, decode
        assert prefill.wrong == decode.wrong == []
        for engine in (prefill, decode):
            engine.until_all_free()


@pytest.fixture
def both(agents: Agents, engine_of: EngineOf) -> Iterator[Engines]:
    """Engines whose answers wait for the next turn for long."""
    with engines(agents, engine_of) as made:
        yield made


def kept(decode: Scheduled, **fields: Any) -> dict[str, Any]:
    """The params of the next turn's prefill request."""
    return decode.offered(PROMPT, NUM_SAID, ASKED, **fields)


def turn(both: Engines, prompt: list[int], params: Mapping[str, Any], salt: str = "") -> Answer:
    """What prefill says to the next turn, whose answer by decode is right and not kept."""
    prefill, decode = both
    streamed = {"output_kind": RequestOutputKind.DELTA}

    answer = prefill.answer(prompt, 1, params, cache_salt=salt)
    said = decode.answer(prompt, 2, answer.params, cache_salt=salt, sampling=streamed)

    assert said.tokens == what_follows(prompt, 2)
    return answer


def test_all_but_the_last_token_is_kept_for_a_while_in_which_vllm_rests(
    agents: Agents, engine_of: EngineOf
) -> None:
    with engines(agents, engine_of, ttl_s=2.0) as (_, decode):
        before = decode.num_free

        params = kept(decode)

        assert params["remote_num_tokens"] == NUM_KEPT
        assert {key: params[key] for key in GOES_ON} == GOES_ON
        assert decode.num_free < before
        assert not decode.scheduler.connector.has_pending_push_work()
        decode.until(lambda: decode.num_free == before)


NOT_KEPT: Mapping[str, tuple[Mapping[str, Any] | None, Mapping[str, Any], str]] = {
    "not asked for": (None, {}, ""),
    "asked for nothing": ({}, {}, ""),
    "streamed": (ASKED, {"output_kind": RequestOutputKind.DELTA}, ""),
    "aborted": (ASKED, {}, "FINISHED_ABORTED"),
    "failed": (ASKED, {}, "FINISHED_ERROR"),
}


@pytest.mark.parametrize("how", NOT_KEPT)
def test_what_nobody_can_go_on_with_is_not_kept(both: Engines, how: str) -> None:
    params, sampling, status = NOT_KEPT[how]
    _, decode = both

    answer = decode.ask(PROMPT, NUM_SAID, params, sampling=sampling)
    decode.until(lambda: len(answer.tokens) == NUM_SAID - bool(status))
    if status:
        decode.give_up(RequestStatus[status])
        decode.step()

    assert answer.params is None
    assert decode.num_free == decode.pool.num_gpu_blocks - 1


def test_nothing_is_kept_unless_the_options_say_so(agents: Agents, engine_of: EngineOf) -> None:
    with engine_of((agents.all[0], None), LARGER) as decode:
        assert decode.answer(PROMPT, NUM_SAID, ASKED).params is None


@pytest.mark.parametrize(
    ("num_cached", "threshold", "num_computed"),
    [
        (0, 1, 1 + len(NEW)),
        (16, NUM_KEPT - 16, 1 + len(NEW)),
        (16, NUM_KEPT - 16 + 1, len(SAID) - 16 + len(NEW)),
        (56, 2, len(SAID) - 56 + len(NEW)),
    ],
)
def test_the_next_turn_loads_what_is_not_cached_and_worth_it(
    agents: Agents, engine_of: EngineOf, num_cached: int, threshold: int, num_computed: int
) -> None:
    with engines(agents, engine_of, kv_recompute_threshold=threshold) as both:
        prefill, decode = both
        prefill.answer([*SAID[:num_cached], 1], 1)

        answer = turn(both, [*SAID, *NEW], kept(decode))

        assert (answer.num_found, answer.num_computed) == (num_cached, num_computed)


def test_a_server_that_may_not_load_computes_the_turn(agents: Agents, engine_of: EngineOf) -> None:
    with engines(agents, engine_of, ttl_s=2.0, bidirectional_kv_xfer=False) as both:
        answer = turn(both, [*SAID, *NEW], kept(both[1]))

        assert answer.num_computed == len(SAID) + len(NEW)


@pytest.mark.parametrize("kind", WRONG)
def test_the_turn_of_a_wrong_ticket_is_computed_and_the_right_one_is_good_after_it(
    both: Engines, kind: str
) -> None:
    params, prompt = kept(both[1]), [*SAID, *NEW]

    wrong = turn(both, prompt, {**WRONG[kind](params), **GOES_ON}, salt="wrong")
    right = turn(both, prompt, params)

    assert (wrong.num_computed, right.num_computed) == (len(prompt), 1 + len(NEW))


@pytest.mark.parametrize("num_kept", [0, 30, NUM_KEPT - 1])
def test_a_turn_whose_past_was_changed_is_computed(both: Engines, num_kept: int) -> None:
    params, prompt = kept(both[1]), [*SAID[:num_kept], 99, *SAID[num_kept + 1 :], *NEW]

    changed = turn(both, prompt, params, salt="changed")
    right = turn(both, [*SAID, *NEW], params)

    assert (changed.num_computed, right.num_computed) == (len(prompt), 1 + len(NEW))


def test_a_turn_whose_ticket_has_expired_is_computed(agents: Agents, engine_of: EngineOf) -> None:
    with engines(agents, engine_of, ttl_s=0.5) as both:
        params = kept(both[1])
        wait_until(agents.all[0].idle, "the offer has expired")

        assert turn(both, [*SAID, *NEW], params).num_computed == len(SAID) + len(NEW)


def test_an_answer_that_ended_by_a_stop_token_goes_on(both: Engines) -> None:
    _, decode = both
    stops = {"stop_token_ids": SAID[-1:]}

    params = decode.offered(PROMPT, NUM_SAID + 9, ASKED, sampling=stops)

    assert turn(both, [*SAID, *NEW], params).num_computed == 1 + len(NEW)
