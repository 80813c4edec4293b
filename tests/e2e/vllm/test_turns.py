"""Conversations with windows, from one rank to two and back, by signed tickets.

Turn 2 of a conversation: prefill reads what decode has kept of turn 1, and computes the rest.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.vllm.calls import RefusedError, ask_in_words
from tests.e2e.vllm.clusters import (
    ALL_THE_SAME,
    FOR_DECODE,
    LARGER,
    NUM_TOKENS,
    Cluster,
    prompt_of,
    works_again,
)
from tests.e2e.vllm.models import LONGEST, WINDOW
from tests.e2e.vllm.routers import is_there

CLUSTER = "turns"
LENGTHS = (31, WINDOW // 2, WINDOW + 1, 3 * WINDOW + 5, 1500)
NUM_NEW = 50


@dataclass(frozen=True)
class Turn:
    """What was said, the answer included, and the params of the prefill request that goes on."""

    prompt: list[int]
    answer: list[int]
    params: dict[str, Any] | None

    def then(self, num_tokens: int, seed: int) -> list[int]:
        """The prompt of the next turn."""
        return [*self.prompt, *self.answer, *prompt_of(num_tokens, seed)]


def turn(pair: Cluster, prompt: Sequence[int], params: Any = FOR_DECODE) -> Turn:
    """One turn by both servers, as a router goes about it; ``params`` are those of the prefill."""
    to_decode = pair.prefill.complete(prompt, 1, kv_transfer_params=params).params
    answer = pair.decode.complete(prompt, NUM_TOKENS, kv_transfer_params=to_decode)
    return Turn(list(prompt), answer.tokens, answer.params)


def last_turn(
    pair: Cluster, prompt: Sequence[int], params: Any = FOR_DECODE, **fields: Any
) -> list[int]:
    """The answer of a turn that is streamed, and so keeps nothing."""
    to_decode = pair.prefill.complete(prompt, 1, kv_transfer_params=params, **fields).params
    return list(pair.begin(prompt, to_decode, stream=True, **fields).stream())


def computed(pair: Cluster) -> float:
    """Tokens of prompts that the prefill server has computed itself, as it counts them."""
    return pair.prefill.metric("prompt_tokens_by_source_total", source="local_compute")


@pytest.mark.kind("sliding windows beside full attention", on="servers")
def test_decode_says_same_as_alone_and_no_handoff_stands_still(pair: Cluster) -> None:
    """A side that waits for a core that it does not get waits for its timeout, and computes."""
    works_again(pair, seed=4000)  # the agents have met
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    others = [prompt_of(length, seed=2000 + length) for length in LENGTHS[:-1]]

    said = [one.result() for one in [pair.soon(prompt) for prompt in prompts]]
    before = pair.decode.from_elsewhere()
    for prompt in others:
        pair.handoff(prompt)

    assert said == [pair.alone(prompt) for prompt in prompts]
    assert pair.decode.from_elsewhere() - before == sum(len(prompt) - 1 for prompt in others)


@pytest.mark.parametrize(("length", "at_once"), [(655, False), (391, True)])
def test_loaded_kv_is_right_for_requests_that_find_it_cached(
    pair: Cluster, length: int, *, at_once: bool
) -> None:
    """Other sequences of the request, the prompt again, and prompts that begin like it."""
    prompt = prompt_of(length, seed=10 * length)
    longer = [*prompt[:-1], *prompt_of(WINDOW // 2, seed=length)]
    handed = [*longer[: LARGER * (length // LARGER)], *prompt_of(70, seed=length + 1)]
    if at_once:
        call, prefill = pair.meet(prompt, **ALL_THE_SAME)
        prefill.completion()
    else:
        call = pair.begin(prompt, pair.ticket(prompt), **ALL_THE_SAME)

    assert call.sequences() == 3 * [pair.alone(prompt)]
    assert pair.again(prompt) == pair.alone(prompt)
    assert pair.again(longer) == pair.alone(longer)
    assert pair.handoff(handed) == pair.alone(handed)


@pytest.mark.parametrize("length", [80, 2048])
def test_prefill_computes_only_what_is_new(pair: Cluster, length: int) -> None:
    first = turn(pair, prompt_of(length, seed=3000 + length))
    prompt, before = first.then(NUM_NEW, seed=1), computed(pair)

    # Neither side finds turn 1 in its prefix cache.
    answer = last_turn(pair, prompt, first.params, cache_salt="another")

    # Nobody has computed the last of turn 1, and decode computes the last of a prompt.
    assert computed(pair) - before == NUM_NEW + 1 - 1
    assert answer == pair.alone(prompt)


def test_each_turn_says_what_decode_says_alone(pair: Cluster) -> None:
    first = turn(pair, prompt_of(333, seed=10))
    second = turn(pair, first.then(NUM_NEW, seed=11), first.params)
    third, before = second.then(1, seed=12), computed(pair)

    answer = last_turn(pair, third, second.params)

    assert second.answer == pair.alone(second.prompt)
    assert answer == pair.alone(third)
    assert computed(pair) - before <= 1 + LARGER


def test_a_turn_that_both_servers_get_at_once_reads_the_last_one(pair: Cluster) -> None:
    first = turn(pair, prompt_of(300, seed=20))
    assert first.params is not None
    prompt, before = first.then(500, seed=21), computed(pair)
    to_decode, to_prefill = pair.awaiting()

    decode = pair.begin(prompt, to_decode, stream=True, cache_salt="met")
    asked = {**to_prefill, **first.params}
    pair.prefill.complete(prompt, 1, kv_transfer_params=asked, cache_salt="met")

    assert list(decode.stream()) == pair.alone(prompt)
    assert computed(pair) - before == 500 + 1 - 1


def test_log_probabilities_of_a_prompt_come_through_a_router(pair: Cluster) -> None:
    """vLLM needs one for each token, so prefill must not leave the last one out."""
    if not is_there("vllm-router"):
        pytest.skip("vllm-router is not installed here: make test-vllm runs this")
    ports, prompt = (pair.router("vllm-router"), pair.decode.port), prompt_of(3 * WINDOW, seed=80)
    fields = {"echo": True, "logprobs": 1}

    said = [ask_in_words(port, [prompt], NUM_TOKENS, **fields).completion() for port in ports]

    assert said[0].tokens == said[1].tokens


def test_refused_or_hung_up_prefill_request_leaves_nothing(pair: Cluster) -> None:
    first, second = (turn(pair, prompt_of(1000, seed=seed)) for seed in (70, 71))

    with pytest.raises(RefusedError):
        turn(pair, first.then(LONGEST, seed=73), first.params)
    fields = {"kv_transfer_params": second.params, "cache_salt": "gone"}
    pair.prefill.begin(second.then(1000, seed=72), 1, **fields).abort()

    pair.check()


def test_servers_that_change_their_roles_fail_no_request(pair: Cluster) -> None:
    roles = [(pair.prefill, pair.decode), (pair.decode, pair.prefill)]

    def handed(number: int) -> bool:
        source, target = roles[number // 5 % 2]
        prompt = prompt_of(150, seed=1000 + number)
        ticket = source.complete(prompt, 1, kv_transfer_params=FOR_DECODE).params
        call = target.begin(prompt, NUM_TOKENS, kv_transfer_params=ticket, stream=True)
        return list(call.stream()) == pair.alone(prompt) and ticket is not None

    def loads() -> list[float]:
        return [server.metric("kvbus_load_bytes_count") for server in roles[0]]

    before = loads()
    with ThreadPoolExecutor(4) as threads:
        served = list(threads.map(handed, range(20)))

    assert served == [True] * 20
    assert [now - then for now, then in zip(loads(), before, strict=True)] == [10, 10]
