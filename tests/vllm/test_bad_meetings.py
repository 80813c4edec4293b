"""Requests that both servers get at the same time, where something is wrong with one of the two."""

import uuid

import anyio
import pytest

from kvbus.engine import PrefillSession
from kvbus.errors import KVBusError
from tests.engines import engine
from tests.vllm.calls import RefusedError
from tests.vllm.clusters import NUM_TOKENS, Cluster, prompt_of
from tests.vllm.shapes import CHUNK_TOKENS, OTHERS, SMALLER, UP

SHAPE = UP
LONG = 4 * CHUNK_TOKENS + 7


def test_a_prefill_request_that_a_router_sends_twice_serves_the_one_decode_request(pair) -> None:
    prompt = prompt_of(LONG, seed=8000)
    to_decode, to_prefill = pair.meeting()

    decode = pair.begin(prompt, to_decode)
    sent = [pair.prefill.begin(prompt, 1, kv_transfer_params=to_prefill) for _ in range(2)]
    answers = [one.completion() for one in sent]

    assert decode.completion().tokens == pair.alone(prompt)
    assert sum(answer.params is not None for answer in answers) == 1
    assert "transfer_id" in pair.prefill.log()


def test_a_decode_request_that_a_router_sends_twice_is_right_both_times(pair: Cluster) -> None:
    prompt = prompt_of(LONG, seed=8100)
    to_decode, to_prefill = pair.meeting()

    sent = [pair.begin(prompt, to_decode) for _ in range(2)]
    pair.prefill.complete(prompt, 1, kv_transfer_params=to_prefill)
    said = [one.completion().tokens for one in sent]

    assert said == 2 * [pair.alone(prompt)]


def test_a_decode_request_that_comes_after_the_meeting_is_over_is_right(pair: Cluster) -> None:
    prompt = prompt_of(100, seed=8200)
    to_decode, to_prefill = pair.meeting()
    pair.prefill.complete(prompt, 1, kv_transfer_params=to_prefill)
    pair.redeem(prompt, to_decode)
    other = [*prompt[1:], prompt[0]]

    assert pair.redeem(other, to_decode) == pair.alone(other)


@pytest.mark.parametrize("num_tokens", [LONG // 2, LONG - 1, LONG + 1, 2 * LONG])
def test_a_decode_prompt_of_another_length_is_not_given_what_prefill_has(pair, num_tokens) -> None:
    prompt = prompt_of(2 * LONG, seed=8300 + num_tokens)
    to_decode, to_prefill = pair.meeting()

    decode = pair.begin(prompt[:num_tokens], to_decode)
    pair.prefill.complete(prompt[:LONG], 1, kv_transfer_params=to_prefill)

    assert decode.completion().tokens == pair.alone(prompt[:num_tokens])


def test_a_prefill_request_that_ends_by_a_stop_token_has_offered_its_prompt(pair: Cluster) -> None:
    prompt, before = prompt_of(LONG, seed=8400), pair.moved()
    to_decode, to_prefill = pair.meeting()
    (first, *_) = pair.alone(prompt)

    decode = pair.begin(prompt, to_decode)
    params = {"kv_transfer_params": to_prefill, "stop_token_ids": [first], "ignore_eos": False}
    ended = pair.prefill.complete(prompt, NUM_TOKENS, **params)

    assert ended.finish_reason == "stop"
    assert decode.completion().tokens == pair.alone(prompt)
    assert pair.moved() > before


def test_a_prefill_request_that_goes_on_to_answer_has_offered_its_prompt(pair: Cluster) -> None:
    prompt, before = prompt_of(LONG, seed=8450), pair.moved()
    to_decode, to_prefill = pair.meeting()

    pair.prefill.complete(prompt, 3 * SMALLER, kv_transfer_params=to_prefill)

    assert pair.redeem(prompt, to_decode) == pair.alone(prompt)
    assert pair.moved() > before


def test_several_sequences_that_both_servers_are_asked_for_are_no_trouble(pair: Cluster) -> None:
    prompt, trouble = prompt_of(LONG, seed=8460), pair.prefill.trouble()
    to_decode, to_prefill = pair.meeting()
    several = {"n": 3, "temperature": 0.01, "top_k": 1}

    decode = pair.begin(prompt, to_decode, **several)
    prefill = pair.prefill.begin(prompt, 1, kv_transfer_params=to_prefill, **several)
    prefill.sequences()

    assert decode.sequences() == 3 * [pair.alone(prompt)]
    assert pair.prefill.trouble() == trouble


def test_a_prefill_request_that_is_refused_leaves_decode_to_compute_the_prompt(pair) -> None:
    prompt = prompt_of(LONG, seed=8500)
    to_decode, to_prefill = pair.meeting()

    decode = pair.begin(prompt, to_decode)
    with pytest.raises(RefusedError):
        pair.prefill.complete(prompt, 1, kv_transfer_params=to_prefill, temperature=-1.0)

    assert decode.completion().tokens == pair.alone(prompt)


def test_an_engine_of_another_model_that_takes_the_name_is_not_read(pair: Cluster) -> None:
    prompt, before = prompt_of(100, seed=8600), pair.moved()
    to_decode, _ = pair.meeting()

    async def open_as_another() -> list[int]:
        async with engine(PrefillSession, pair.prefill_agent.attach) as other:
            offer = await other.prefill.offer(
                "another",
                num_tokens=100,
                block_ids=other.some_blocks(1, 100),
                transfer_id=to_decode["rendezvous"]["transfer_id"],
            )
            decode = pair.begin(prompt, to_decode)
            tokens = (await anyio.to_thread.run_sync(decode.completion)).tokens
            await offer.withdraw()
            return tokens

    assert anyio.run(open_as_another) == pair.alone(prompt)
    assert pair.moved() == before


def test_a_name_that_is_taken_is_told_to_the_engine_that_comes_second(pair: Cluster) -> None:
    name = uuid.uuid4().hex

    async def open_twice() -> str:
        async with engine(PrefillSession, pair.prefill_agent.attach) as other:
            blocks = other.some_blocks(1, 16)
            offer = await other.prefill.offer(
                "a", num_tokens=16, block_ids=blocks, transfer_id=name
            )
            with pytest.raises(KVBusError) as refused:
                await other.prefill.offer("b", num_tokens=16, block_ids=blocks, transfer_id=name)
            await offer.withdraw()
            return str(refused.value)

    assert "transfer_id" in anyio.run(open_twice)


@pytest.mark.parametrize("pair", [OTHERS], ids=["others"], indirect=True)
def test_a_decode_server_of_another_model_reads_nothing(pair: Cluster) -> None:
    prompt = prompt_of(100, seed=8700)

    decode, prefill = pair.meet(prompt)
    prefill.completion()

    assert decode.completion().tokens == pair.alone(prompt)
    assert pair.moved() == 0
