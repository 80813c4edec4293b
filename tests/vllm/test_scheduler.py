"""Handoffs by vLLM's own scheduler, its own requests and real agents, but no model: who loads what.

Whatever is asked, no token reads KV that is not of the tokens before it, and no block is left.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request, RequestStatus
from vllm.v1.utils import ConstantList

from kvbus.integrations.vllm.scheduler_side import urgency_of
from tests.agents import Agents, wait_until
from tests.vllm.clusters import halted
from tests.vllm.scheduled import Answer, EngineOf, Scheduled, prompt_of, what_follows
from tests.vllm.tickets import DO_NOT_FIT, WRONG, unreachable

TO_DECODE = {"do_remote_decode": True}
SMALLER, LARGER = 8, 16
STEP_TOKENS = 24
LENGTH = 2 * STEP_TOKENS
PROMPT = prompt_of(LENGTH)
SOON = {"fetch_timeout_s": 2.0, "offer_ttl_s": 3.0}
"""For what comes to nothing."""

Fields = Mapping[str, Any]


@dataclass
class Pair:
    """A prefill and a decode engine of unlike block sizes, and their agents."""

    agents: Agents
    prefill: Scheduled
    decode: Scheduled

    def params(self, prompt: list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
        """What a router gets with the prefill's answer."""
        return self.prefill.offered(prompt, 1, TO_DECODE, **fields)

    def meeting(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The params for decode and for prefill of a request that both get at once."""
        name = uuid.uuid4().hex
        meets = {"transfer_id": name, "endpoint": self.agents.all[0].peer}
        return {"do_remote_prefill": True, "rendezvous": meets}, {**TO_DECODE, "transfer_id": name}

    def until_ended(self, *answers: Answer) -> None:
        """Step both until these have ended."""
        while not all(answer.ended for answer in answers):
            self.prefill.step()
            self.decode.step()

    @property
    def num_offers(self) -> int:
        """Those that the prefill agent has, reservations included."""
        return int(self.agents.all[0].status()["counts"]["offers"])


@contextmanager
def pair_of(agents: Agents, engine_of: EngineOf, **options: Any) -> Iterator[Pair]:
    """Engines that have read nothing wrong, and hold nothing at last."""
    theirs = {"step_tokens": STEP_TOKENS, **options}
    ours = {key: options[key] for key in ("fetch_timeout_s", "of") if key in options}
    with (
        engine_of((agents.all[0], None), SMALLER, **theirs) as prefill,
        engine_of((None, agents.all[1]), LARGER, **ours) as decode,
    ):
        yield Pair(agents, prefill, decode)
        assert prefill.wrong == decode.wrong == []
        for engine in (prefill, decode):
            engine.until_all_free()


@pytest.fixture
def pair(agents: Agents, engine_of: EngineOf) -> Iterator[Pair]:
    """Engines of models without windows."""
    with pair_of(agents, engine_of) as made:
        yield made


def with_image(identifier: str, offset: int = 0) -> dict[str, Any]:
    position = PlaceholderRange(offset=offset, length=4)
    return {"mm_features": [MultiModalFeatureSpec(None, "image", identifier, position)]}


def has_images(engine: Scheduled) -> None:
    """As vLLM's scheduler has them for a model that takes images."""
    engine.scheduler.max_num_encoder_input_tokens = LENGTH
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(LENGTH)


LORA = {"lora_request": LoRARequest("one", 1, "/one")}
EMBEDDINGS = {"prompt_embeds": torch.zeros(LENGTH, 8)}
SAME: Mapping[str, Callable[[], Fields]] = {
    "text": dict,
    "lora": lambda: LORA,
    "image": lambda: with_image("one"),
}
OTHER: Mapping[str, tuple[Fields, list[int] | None, Fields]] = {
    "other text": ({}, PROMPT[::-1], {}),
    "one token other": ({}, [*PROMPT[:-1], 99], {}),
    "a lora": ({}, PROMPT, LORA),
    "an image": ({}, PROMPT, with_image("one")),
    "another image": (with_image("one"), PROMPT, with_image("two")),
    "embeddings": ({}, None, EMBEDDINGS),
}
"""Of the prefill request, and of the decode request with its ticket."""


@pytest.mark.parametrize("kind", SAME)
def test_what_one_engine_has_computed_the_other_loads(pair: Pair, kind: str) -> None:
    has_images(pair.prefill)
    params = pair.params(**SAME[kind]())

    answer = pair.decode.answer(PROMPT, 3, params, **SAME[kind]())

    assert answer.num_computed == 1
    assert answer.tokens == what_follows(PROMPT, 3)


@pytest.mark.parametrize("kind", OTHER)
def test_another_request_is_computed_and_the_same_one_is_loaded_after_it(
    pair: Pair, kind: str
) -> None:
    theirs, prompt, ours = OTHER[kind]
    has_images(pair.prefill)
    has_images(pair.decode)
    params = pair.params(**theirs)

    other = pair.decode.answer(prompt, 3, params, **ours)
    same = pair.decode.answer(PROMPT, 3, params, **theirs)

    assert (other.num_found + other.num_computed, same.num_computed) == (LENGTH, 1)
    assert other.tokens == what_follows(prompt or LENGTH * [0], 3)
    assert same.tokens == what_follows(PROMPT, 3)


def test_an_image_behind_what_was_prefilled_does_not_matter(pair: Pair) -> None:
    has_images(pair.prefill)
    has_images(pair.decode)
    both = with_image("one")["mm_features"] + with_image("new", LENGTH)["mm_features"]
    params = pair.params(**with_image("one"))

    answer = pair.decode.answer([*PROMPT, 1, 2, 3, 4], 2, params, mm_features=both)

    assert answer.num_computed == 4


@pytest.mark.parametrize("kind", WRONG)
def test_the_prompt_of_a_wrong_ticket_is_computed_and_the_right_one_is_good_after_it(
    pair: Pair, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    params = pair.params()

    wrong = pair.decode.answer(PROMPT, 3, WRONG[kind](params), cache_salt="wrong")
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    right = pair.decode.answer(PROMPT, 3, params)

    assert (wrong.num_computed, right.num_computed, len(errors)) == (LENGTH, 1, 1)
    assert wrong.tokens == right.tokens == what_follows(PROMPT, 3)


@pytest.mark.parametrize("kind", DO_NOT_FIT)
def test_a_ticket_that_does_not_fit_its_prompt_makes_no_wrong_token(pair: Pair, kind: str) -> None:
    more, changes, num_computed = DO_NOT_FIT[kind]
    prompt = prompt_of(LENGTH + more)
    params = pair.params()

    answer = pair.decode.answer(prompt, 3, {**params, **changes(LENGTH)}, cache_salt="other")
    pair.decode.answer(PROMPT, 1, params)

    assert answer.tokens == what_follows(prompt, 3)
    assert answer.num_computed == (len(prompt) if num_computed is None else num_computed)


def test_a_ticket_is_good_once(pair: Pair) -> None:
    params = pair.params()

    first, again = (pair.decode.answer(PROMPT, 2, params, cache_salt=salt) for salt in "ab")

    assert (first.num_computed, again.num_computed) == (1, LENGTH)


def test_a_ticket_sent_to_the_wrong_side_is_no_harm(pair: Pair) -> None:
    params = pair.params()

    at_prefill = pair.prefill.answer(PROMPT, 2, params, cache_salt="other")
    at_decode = pair.decode.answer(PROMPT, 2, TO_DECODE)
    right = pair.decode.answer(PROMPT, 2, params, cache_salt="right")

    assert at_prefill.tokens == at_decode.tokens == right.tokens == what_follows(PROMPT, 2)


def test_only_what_decode_has_not_cached_is_loaded_and_the_rest_releases_the_offer(
    pair: Pair,
) -> None:
    longer = [*PROMPT[: 2 * LARGER], *prompt_of(30, seed=1)]
    pair.decode.answer(PROMPT, 2, pair.params())

    known = pair.decode.answer(PROMPT, 2, pair.params())
    partly = pair.decode.answer(longer, 2, pair.params(longer))

    assert known.num_found == LENGTH - LARGER
    assert (partly.num_found, partly.num_computed) == (2 * LARGER, 1)


def test_at_once_decode_reads_what_prefill_still_computes_and_never_its_answer(
    pair: Pair,
) -> None:
    to_decode, to_prefill = pair.meeting()
    loads = pair.decode.ask(PROMPT, 3, to_decode)
    offers = pair.prefill.ask(PROMPT, 9, to_prefill, name="grows")
    grown = []

    while not offers.ended:
        pair.prefill.step()
        spans = pair.agents.all[0].trace(request_id="grows")
        grown += [span["attributes"]["num_tokens"] for span in spans if span["name"] == "offer"]
    pair.until_ended(loads)

    assert loads.num_computed == 1
    assert loads.tokens == what_follows(PROMPT, 3)
    assert offers.params is not None
    assert offers.params["remote_num_tokens"] == max(grown) == LENGTH


def test_at_once_one_of_two_prefill_requests_serves_and_both_decode_requests_are_right(
    pair: Pair,
) -> None:
    to_decode, to_prefill = pair.meeting()

    loads = [pair.decode.ask(PROMPT, 3, to_decode) for _ in range(2)]
    offers = [pair.prefill.ask(PROMPT, 1, to_prefill) for _ in range(2)]
    pair.until_ended(*loads, *offers)

    assert [answer.params is not None for answer in offers].count(True) == 1
    assert [answer.tokens for answer in loads] == 2 * [what_follows(PROMPT, 3)]


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
def test_at_once_decode_is_given_the_prompt_that_both_have_and_nothing_else(
    pair: Pair, kind: str
) -> None:
    case, (to_decode, to_prefill) = AT_ONCE[kind], pair.meeting()
    sampling = {"stop_token_ids": list(case.stops)}

    loads = pair.decode.ask(case.decode, 3, to_decode)
    offers = pair.prefill.ask(case.prefill, case.num_said, to_prefill, sampling=sampling)
    pair.until_ended(loads, offers)

    assert loads.tokens == what_follows(case.decode, 3)
    assert loads.num_computed == (case.num_computed or len(case.decode))


@pytest.mark.parametrize("kind", ["a name", "a ticket"])
def test_decode_computes_what_it_does_not_get_in_time(
    agents: Agents, engine_of: EngineOf, kind: str
) -> None:
    with pair_of(agents, engine_of, **SOON) as pair:
        params = pair.meeting()[0] if kind == "a name" else unreachable(pair.params())

        answer = pair.decode.answer(PROMPT, 3, params)

        assert answer.num_computed == LENGTH
        assert answer.tokens == what_follows(PROMPT, 3)


def test_of_the_sequences_of_a_named_prompt_the_first_is_offered_and_no_other_fails(
    pair: Pair,
) -> None:
    to_decode, to_prefill = pair.meeting()
    offers = [pair.prefill.ask(PROMPT, 1, to_prefill, name=f"{n}_r") for n in range(3)]
    pair.prefill.until_ended(*offers)
    stats = pair.prefill.scheduler.connector.get_kv_connector_stats()

    loads = pair.decode.answer(PROMPT, 3, to_decode)

    assert [answer.params is not None for answer in offers] == [True, False, False]
    assert loads.num_computed == 1
    assert stats is None or not stats.data["offers_failed"]


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR"])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_what_prefill_does_not_end_well_is_not_offered(
    pair: Pair, status: str, num_steps: int
) -> None:
    answer = pair.prefill.ask(PROMPT, 9, TO_DECODE)
    for _ in range(num_steps):
        pair.prefill.step()

    pair.prefill.give_up(RequestStatus[status])

    pair.prefill.step()
    assert answer.params is None
    wait_until(lambda: not pair.num_offers, "the reservation is gone")


def test_a_prompt_with_embeddings_is_not_offered(pair: Pair) -> None:
    assert pair.prefill.answer(None, 1, TO_DECODE, **EMBEDDINGS).params is None
    wait_until(lambda: not pair.num_offers, "the reservation is gone")


def test_the_offer_of_a_request_that_decode_has_refused_is_given_back(pair: Pair) -> None:
    """vLLM's frontend tells of it by a request of one token that is aborted at once."""
    pair.decode.ask([0], 1, pair.params(), abort_immediately=True)

    pair.decode.give_up()

    wait_until(lambda: not pair.num_offers, "the offer is over")


@pytest.mark.parametrize("moment", ["before its load", "in its load", "behind its load"])
def test_a_decode_request_that_is_given_up_disturbs_no_other_and_leaves_nothing(
    pair: Pair, moment: str
) -> None:
    prompts = [prompt_of(LENGTH, seed) for seed in range(2)]
    tickets = [pair.params(prompt) for prompt in prompts]

    def under_way() -> bool:
        return bool(pair.agents.all[1].status()["counts"]["fetches"] == 2)

    with halted([pair.agents.all[0].pid]):
        other = pair.decode.ask(prompts[0], 3, tickets[0])
        given_up = pair.decode.ask(prompts[1], 30, tickets[1])
        if moment == "in its load":
            pair.decode.until(under_way)
        if moment != "behind its load":
            pair.decode.give_up()
    if moment == "behind its load":
        pair.decode.until(lambda: given_up.tokens)
        pair.decode.give_up()
    pair.decode.until_ended(other)

    assert other.num_computed == 1
    assert other.tokens == what_follows(prompts[0], 3)
    wait_until(lambda: not pair.num_offers, "both offers are over")


def test_blocks_are_held_until_they_are_read_and_free_for_the_next_request_without_a_step(
    pair: Pair,
) -> None:
    before = pair.prefill.num_free
    params = pair.params()
    held = before - pair.prefill.num_free

    pair.decode.answer(PROMPT, 2, params)
    wait_until(lambda: not pair.num_offers, "the offer is over")

    def come_back() -> bool:
        pair.prefill.ask([5], 1)
        return pair.prefill.num_free == before

    assert held == LENGTH // SMALLER
    wait_until(come_back, "the blocks are free")


def test_blocks_that_vllm_still_writes_to_are_not_free_when_they_are_read(pair: Pair) -> None:
    """vLLM frees late what a step that was begun may still write to."""
    params = pair.params()
    held = [block for block in pair.prefill.pool.blocks if block.ref_cnt and not block.is_null]
    pair.prefill.pool.touch(held)

    pair.decode.answer(PROMPT, 2, params)
    pair.prefill.until(lambda: all(block.ref_cnt == 1 for block in held))

    pair.prefill.pool.free_blocks(held)


def test_offered_blocks_are_given_to_no_other_and_who_finds_no_room_waits_for_their_reader(
    agents: Agents, engine_of: EngineOf
) -> None:
    with pair_of(agents, engine_of, num_requests=1) as pair:
        prompts = [prompt_of(LENGTH, seed) for seed in range(6)]
        tickets = [pair.params(prompt) for prompt in prompts]
        for seed in range(10, 30):
            pair.prefill.answer(prompt_of(LENGTH, seed), 1)
        waits = pair.prefill.ask(prompt_of(150, seed=30), 1)
        for _ in range(9):
            pair.prefill.step()
        assert not waits.ended

        said = [pair.decode.answer(p, 2, one) for p, one in zip(prompts, tickets, strict=True)]
        pair.prefill.until_ended(waits)

        assert [answer.num_computed for answer in said] == 6 * [1]


def test_decode_is_right_when_prefill_preempts_what_it_reads(
    agents: Agents, engine_of: EngineOf
) -> None:
    with pair_of(agents, engine_of, num_requests=1) as pair:
        to_decode, to_prefill = pair.meeting()
        loads = pair.decode.ask(PROMPT, 3, to_decode)
        grows = pair.prefill.ask(prompt_of(100, seed=1), 200)
        offers = pair.prefill.ask(PROMPT, 150, to_prefill)
        (_, offered) = pair.prefill.requests

        pair.until_ended(loads, grows, offers)

        assert offered.num_preemptions > 0
        assert loads.tokens == what_follows(PROMPT, 3)


def test_vllm_steps_on_for_a_while_after_an_offer_and_to_the_last_one_where_it_drains(
    agents: Agents, engine_of: EngineOf
) -> None:
    with (
        pair_of(agents, engine_of) as rests,
        pair_of(agents, engine_of, drains_s=9) as drains,
    ):
        tickets = [pair.params() for pair in (drains, rests)]

        def pending(pair: Pair) -> bool:
            is_pending: bool = pair.prefill.scheduler.connector.has_pending_push_work()
            return is_pending

        assert pending(rests)
        wait_until(lambda: not pending(rests), "vLLM rests")
        assert pending(drains)
        for pair, ticket in zip((drains, rests), tickets, strict=True):
            pair.decode.answer(PROMPT, 2, ticket)
        drains.prefill.until(lambda: not pending(drains))


@pytest.mark.parametrize(
    ("of", "fields", "num_left"),
    [(None, {}, 0), (32, {}, 1), (32, EMBEDDINGS, 0), (32, {"prompt": [5]}, 0)],
    ids=["no window", "window", "embeddings", "one token"],
)
def test_with_a_window_the_last_token_of_a_prompt_of_tokens_is_left_to_decode(
    agents: Agents, engine_of: EngineOf, of: int | None, fields: Fields, num_left: int
) -> None:
    """vLLM's worker ends when the tokens are not as many as the embeddings."""
    with pair_of(agents, engine_of, of=of) as pair:
        request = pair.prefill.request(**{"prompt": PROMPT, "params": TO_DECODE, **fields})
        num_tokens = request.num_tokens

        pair.prefill.add(request)

        assert request.num_prompt_tokens == request.num_tokens == num_tokens - num_left
        pair.prefill.give_up()


@pytest.mark.parametrize(
    ("vllms", "ours"), [(0, 0), (5, -5), (-5, 5), (2**40, -(2**31)), (-(2**40), 2**31 - 1)]
)
def test_a_request_that_vllm_takes_earlier_is_more_urgent(vllms: int, ours: int) -> None:
    sampling = SamplingParams(max_tokens=1)

    assert urgency_of(Request("r", [1], sampling, None, priority=vllms)) == ours


class Watched(ConstantList):  # type: ignore[misc]  # vLLM is unknown where it is not installed
    """Tokens that note how many of them are taken at a time."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(tokens)
        self.taken: list[int] = []

    def __getitem__(self, item: Any) -> Any:
        found = super().__getitem__(item)
        if isinstance(item, slice):
            self.taken.append(len(found))
        return found


def test_the_tokens_of_a_request_are_hashed_once_on_each_side(pair: Pair) -> None:
    """vLLM's scheduler waits meanwhile, and it takes the longer the longer a prompt is."""
    to_decode, to_prefill = pair.meeting()
    requests = []
    for engine, params in ((pair.prefill, to_prefill), (pair.decode, to_decode)):
        request = engine.request(PROMPT, 1, params)
        request.all_token_ids = Watched(list(PROMPT))
        engine.until_ended(engine.add(request))
        requests.append(request)

    assert [request.all_token_ids.taken.count(LENGTH) for request in requests] == [1, 1]
