"""One ticket and several requests, several readers of an offer, and readers that give up.

By vLLM's own scheduler and real agents.
"""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from kvbus.protocol import Role
from tests.e2e.vllm.clusters import signing_keys
from tests.e2e.vllm.scheduled import (
    LARGER,
    LENGTH,
    PROMPT,
    SMALLER,
    TO_DECODE,
    EngineOf,
    Pair,
    pair_of,
    prompt_of,
    what_follows,
)
from tests.support.agents import Agents, agents_ended, wait_until
from tests.support.keyring import KeyRing


@pytest.mark.parametrize(
    ("ended", "in_its_load"),
    [(None, False), (0, False), (2, False), (0, True)],
    ids=["none ends", "the first ends", "another ends", "the first ends in its load"],
)
def test_one_request_loads_shared_ticket_and_others_hit_cache(
    engines: Pair, ended: int | None, *, in_its_load: bool
) -> None:
    params = engines.params()
    answers = [engines.decode.ask(PROMPT, 3, dict(params), name=f"{n}_r") for n in range(3)]
    if in_its_load:
        engines.decode.step()
    if ended is not None:
        engines.decode.give_up(name=f"{ended}_r")
        del answers[ended]

    engines.decode.until_ended(*answers)

    assert [answer.tokens for answer in answers] == len(answers) * [what_follows(PROMPT, 3)]
    assert "failed" not in engines.decode.figures["loads"]
    if not in_its_load:
        assert min(answer.num_computed for answer in answers) == 1
        assert max(answer.num_computed for answer in answers) <= LARGER
    engines.wait_no_offer()


def test_a_ticket_for_two_readers_is_good_at_two_decode_engines(
    engines: Pair, engine_of: EngineOf
) -> None:
    params = engines.prefill.offered(PROMPT, 1, {**TO_DECODE, "readers": 2})
    with engine_of((None, engines.agents.all[1]), LARGER) as other:
        said = [engine.answer(PROMPT, 2, params) for engine in (engines.decode, other)]

    assert [answer.num_computed for answer in said] == [1, 1]
    engines.wait_no_offer()


def test_only_last_ended_sequence_of_prompt_is_offered(
    engines: Pair,
) -> None:
    free = engines.prefill.num_free
    *_, last = [engines.params(name=f"{number}_chatcmpl-a") for number in range(3)]
    engines.prefill.until(lambda: engines.prefill.num_free == free - LENGTH // SMALLER)

    assert engines.decode.answer(PROMPT, 2, last).num_computed == 1
    assert not engines.prefill.figures["offers_failed"]


def test_first_sequence_of_named_prompt_is_offered_none_fails(
    engines: Pair,
) -> None:
    to_decode, to_prefill = engines.awaiting()
    loads = [engines.decode.ask(PROMPT, 3, to_decode) for _ in range(2)]
    offers = [engines.prefill.ask(PROMPT, 1, to_prefill, name=f"{n}_r") for n in range(3)]

    engines.until_ended(*offers, *loads)

    assert [answer.params is not None for answer in offers] == [True, False, False]
    assert min(answer.num_computed for answer in loads) == 1
    assert [answer.tokens for answer in loads] == 2 * [what_follows(PROMPT, 3)]
    assert not engines.prefill.figures["offers_failed"]


def test_requests_with_long_ids_unlike_in_middle_are_handed_off(engines: Pair) -> None:
    prompts, ends = [prompt_of(LENGTH, seed) for seed in (1, 2)], 1000 * "a"
    names = [f"{ends}{number}{ends}" for number in range(2)]
    tickets = [engines.params(p, name=n) for p, n in zip(prompts, names, strict=True)]

    said = [engines.decode.answer(p, 2, t) for p, t in zip(prompts, tickets, strict=True)]

    assert [answer.num_computed for answer in said] == [1, 1]
    assert len({ticket["ticket"]["request_id"] for ticket in tickets}) == 2


def test_a_name_that_is_taken_is_refused_and_vllms_log_says_so(
    engines: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    _, to_prefill = engines.awaiting()
    engines.prefill.ask(PROMPT, 99, to_prefill, name="first")
    engines.prefill.step()
    wait_until(lambda: engines.num_offers, "the name is taken")

    again = engines.prefill.answer(prompt_of(20, 1), 1, to_prefill, name="again")

    assert again.params is None
    (line,) = (one.getMessage() for one in caplog.records if one.levelname == "ERROR")
    assert "request again: its KV is not offered" in line
    assert line.endswith("an offer with this transfer_id was made before [offer_exists]")
    engines.prefill.give_up(name="first")


@pytest.mark.parametrize("moment", ["before", "while", "after"])
def test_at_once_request_given_up_by_decode_leaves_no_offer(
    engines: Pair, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    to_decode, to_prefill = engines.awaiting()
    decode = engines.agents.all[1]

    def give_up() -> None:
        engines.decode.give_up()
        engines.decode.until_all_free()
        wait_until(decode.idle, "the fetch is over")

    engines.decode.ask(PROMPT, 3, to_decode)
    engines.decode.step()
    wait_until(lambda: decode.status()["counts"]["fetches"], "it waits for the offer")
    if moment == "before":
        give_up()
    offers = engines.prefill.ask(PROMPT, 2, to_prefill)
    engines.prefill.step()
    if moment == "while":
        wait_until(lambda: engines.num_offers, "there is an offer")
        give_up()
    engines.prefill.until_ended(offers)
    if moment == "after":
        assert offers.params is not None
        offer_id = offers.params["ticket"]["offer_id"]
        prefill = engines.agents.all[0]
        wait_until(lambda: "SealOffer" in str(prefill.status(offer_id=offer_id)), "it is sealed")
        give_up()

    engines.wait_no_offer()
    engines.prefill.until_all_free()
    assert (offers.params is not None) == (moment == "after")
    assert "not offered" not in caplog.text


def test_at_once_request_given_up_by_prefill_is_computed(engines: Pair) -> None:
    to_decode, to_prefill = engines.awaiting()
    loads = engines.decode.ask(PROMPT, 3, to_decode)
    engines.prefill.ask(PROMPT, 2, to_prefill)
    engines.prefill.step()
    engines.decode.step()
    wait_until(lambda: engines.num_offers, "there is an offer")

    engines.prefill.give_up()

    engines.until_ended(loads)
    assert loads.tokens == what_follows(PROMPT, 3)
    assert loads.num_computed == LENGTH


def test_a_load_that_failed_is_told_with_all_ids_of_its_request(
    engines: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    params = engines.params(name="known-to-agents")
    wrong = {**params, "ticket": {**params["ticket"], "secret": 32 * "0"}}

    engines.decode.answer(PROMPT, 2, wrong, name="of-the-decode-vllm", cache_salt="wrong")
    engines.decode.answer(PROMPT, 2, params)

    assert "request of-the-decode-vllm ('known-to-agents' in the prefill vLLM, fetch" in caplog.text


@pytest.fixture(scope="module")
def signing() -> Iterator[Agents]:
    """Agents that sign their tickets."""
    with agents_ended(Agents) as agents:
        ring, keys = KeyRing(agents.folder), signing_keys(agents.folder)
        for role in (Role.PREFILL, Role.DECODE):
            ring.prepare(agents, role, role.value, **keys)
        agents.start(*agents.all)
        yield agents
        agents.check()


def were_ahead(engines: Pair) -> list[bool]:
    """Of two handoffs behind a first one, where the agents meet: whether they were read ahead."""
    lines = []
    for seed, name in enumerate(("first", "second", "third")):
        prompt = prompt_of(LENGTH, seed)
        params = engines.params(prompt, name=name)
        assert bool(params["ticket"]["blocks"]) != bool(params["ticket"]["signature"])
        assert engines.decode.answer(prompt, 2, params).num_computed == 1
        lines += engines.agents.all[1].says("handoff.completed", request_id=name)
    return [line["speculative"] for line in lines[1:]]


def test_ticket_blocks_are_read_before_lease_signed_names_none(
    engines: Pair, signing: Agents, engine_of: EngineOf
) -> None:
    with pair_of(signing, engine_of) as signed:
        assert were_ahead(engines) == [True, True]
        assert were_ahead(signed) == [False, False]


def test_a_signed_ticket_is_good_for_its_prompt_alone(signing: Agents, engine_of: EngineOf) -> None:
    offering, loading = signing.all
    other = PROMPT[::-1]
    with (
        engine_of((offering, None), SMALLER) as prefill,
        engine_of((None, loading), LARGER) as decode,
    ):
        tickets = [prefill.offered(prompt, 1, TO_DECODE) for prompt in (PROMPT, other)]
        lie = {**tickets[0], "prompt_digest": tickets[1]["prompt_digest"]}

        answer = decode.answer(other, 2, lie)

        assert answer.tokens == what_follows(other, 2)
        assert answer.num_computed == LENGTH
