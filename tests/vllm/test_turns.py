"""Conversations with windows, from one rank to two and back, by signed tickets.

Turn 2 of a conversation: prefill reads what decode has kept of turn 1, and computes the rest.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from tests.agents import wait_until
from tests.vllm.calls import RefusedError, ask
from tests.vllm.clusters import (
    ALL_THE_SAME,
    FOR_DECODE,
    LARGER,
    NUM_TOKENS,
    SETTLES_WITHIN_S,
    Cluster,
    prompt_of,
    works_again,
)
from tests.vllm.models import LONGEST, WINDOW
from tests.vllm.servers import VllmServer
from tests.vllm.tickets import WRONG

CLUSTER = "turns"
LENGTHS = (31, WINDOW // 2, WINDOW + 1, 3 * WINDOW + 5, 1500)
FOUND = (300, 391, 655)
ANSWER = 24


@dataclass(frozen=True)
class Turn:
    """What was said, the answer included, and the params of the prefill request that goes on."""

    prompt: list[int]
    answer: list[int]
    params: dict[str, Any] | None

    def then(self, num_tokens: int, seed: int) -> list[int]:
        """The prompt of the next turn."""
        return [*self.prompt, *self.answer, *prompt_of(num_tokens, seed)]


def turn(pair: Cluster, prompt: Sequence[int], params: Any = FOR_DECODE, **fields: Any) -> Turn:
    """One turn by both servers, as a router goes about it; ``params`` are those of the prefill."""
    to_decode = pair.prefill.complete(prompt, 1, kv_transfer_params=params, **fields).params
    answer = pair.decode.complete(prompt, ANSWER, kv_transfer_params=to_decode, **fields)
    return Turn(list(prompt), answer.tokens, answer.params)


def last_turn(
    pair: Cluster, prompt: Sequence[int], params: Any = FOR_DECODE, **fields: Any
) -> list[int]:
    """The answer of a turn that is streamed, and so keeps nothing."""
    to_decode = pair.prefill.complete(prompt, 1, kv_transfer_params=params, **fields).params
    call = pair.decode.begin(prompt, ANSWER, kv_transfer_params=to_decode, stream=True, **fields)
    return list(call.stream())


def computed(pair: Cluster) -> float:
    """Tokens of prompts that the prefill server has computed itself, as it counts them."""
    return pair.prefill.metric("prompt_tokens_by_source_total", source="local_compute")


def test_decode_says_what_it_says_alone(pair: Cluster) -> None:
    works_again(pair, seed=4000)  # the agents have met
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    before = pair.moved()

    said = [one.result() for one in [pair.soon(prompt) for prompt in prompts]]

    assert said == [pair.alone(prompt) for prompt in prompts]
    assert pair.moved() > before


@pytest.mark.parametrize("at_once", [False, True], ids=["ticket", "at once"])
def test_what_was_loaded_is_right_for_whoever_finds_it_in_the_cache(
    pair: Cluster, at_once: bool
) -> None:
    """Other sequences of the request, the prompt again, and prompts that begin like it."""
    for length in FOUND:
        prompt = prompt_of(length, seed=1000 * at_once + 10 * length)
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


def test_no_handoff_of_many_stands_still(pair: Cluster) -> None:
    """A side that waits for a core that it does not get waits for its timeout, and computes."""
    prompts = [prompt_of(LENGTHS[number % 4], seed=2000 + number) for number in range(12)]
    before = pair.decode.from_elsewhere()

    for prompt in prompts:
        pair.handoff(prompt)

    assert pair.decode.from_elsewhere() - before == sum(len(prompt) - 1 for prompt in prompts)


@pytest.mark.parametrize("length", [80, 2 * WINDOW, 2048])
def test_prefill_computes_only_what_is_new(pair: Cluster, length: int) -> None:
    first = turn(pair, prompt_of(length, seed=3000 + length))
    prompt, before = first.then(50, seed=1), computed(pair)

    # Neither side finds turn 1 in its prefix cache.
    answer = last_turn(pair, prompt, first.params, cache_salt="another")

    # Nobody has computed the last of turn 1, and decode computes the last of a prompt.
    assert computed(pair) - before == 50 + 1 - 1
    assert answer == pair.alone(prompt, ANSWER)


def test_each_turn_says_what_decode_says_alone(pair: Cluster) -> None:
    first = turn(pair, prompt_of(333, seed=10))
    second = turn(pair, first.then(50, seed=11), first.params)
    third, before = second.then(1, seed=12), computed(pair)

    answer = last_turn(pair, third, second.params)

    assert second.answer == pair.alone(second.prompt, ANSWER)
    assert answer == pair.alone(third, ANSWER)
    assert computed(pair) - before <= 1 + LARGER


def test_a_turn_that_both_servers_get_at_once_reads_the_last_one(pair: Cluster) -> None:
    first = turn(pair, prompt_of(300, seed=20))
    assert first.params is not None
    prompt, before = first.then(500, seed=21), computed(pair)
    to_decode, to_prefill = pair.meeting()

    decode = pair.begin(prompt, to_decode, stream=True, cache_salt="met")
    asked = {**to_prefill, **first.params}
    pair.prefill.complete(prompt, 1, kv_transfer_params=asked, cache_salt="met")

    assert list(decode.stream()) == pair.alone(prompt)
    assert computed(pair) - before == 500 + 1 - 1


def test_the_proxy_brings_the_last_turn_of_a_conversation(pair: Cluster) -> None:
    port, name = pair.router("proxy"), "a conversation"
    prompt = prompt_of(300, seed=30)
    first = ask(port, prompt, ANSWER, conversation_id=name).completion()
    prompt = [*prompt, *first.tokens, *prompt_of(50, seed=31)]
    before = computed(pair)

    more = ask(port, prompt, ANSWER, stream=True, cache_salt="proxy", conversation_id=name)
    answer = list(more.stream())

    assert answer == pair.alone(prompt, ANSWER)
    assert computed(pair) - before == 50 + 1 - 1


@pytest.mark.parametrize("kind", ["with another secret", "of another engine"])
def test_prefill_computes_the_conversation_of_a_wrong_ticket(pair: Cluster, kind: str) -> None:
    first = turn(pair, prompt_of(200, seed=40 + len(kind)))
    assert first.params is not None
    prompt, before = first.then(50, seed=41), computed(pair)
    wrong = {**WRONG[kind](first.params), "do_remote_decode": True, "do_remote_prefill": False}

    answer = last_turn(pair, prompt, wrong, cache_salt=kind)

    assert computed(pair) - before == len(prompt) - 1
    assert answer == pair.alone(prompt, ANSWER)
    last_turn(pair, prompt, first.params)


def test_prefill_computes_the_conversation_when_the_agent_beside_decode_was_killed(
    pair: Cluster,
) -> None:
    first = turn(pair, prompt_of(300, seed=50))
    prompt, seeds = first.then(50, seed=51), count(60)
    pair.agent_of_answers.kill()

    answer = last_turn(pair, prompt, first.params, cache_salt="killed")
    pair.agent_of_answers.start()

    assert answer == pair.alone(prompt, ANSWER)
    wait_until(
        lambda: turn(pair, prompt_of(100, seed=next(seeds))).params, "an offer", SETTLES_WITHIN_S
    )


def test_a_prefill_request_that_is_refused_or_hangs_up_leaves_nothing(pair: Cluster) -> None:
    first, second = (turn(pair, prompt_of(1000, seed=seed)) for seed in (70, 71))
    prompt = second.then(1000, seed=72)

    with pytest.raises(RefusedError):
        turn(pair, first.then(LONGEST, seed=73), first.params)
    pair.prefill.begin(prompt, 1, kv_transfer_params=second.params, cache_salt="gone").abort()

    assert last_turn(pair, prompt) == pair.alone(prompt, ANSWER)


def test_servers_that_change_their_roles_fail_no_request(pair: Cluster) -> None:
    def handed(number: int) -> bool:
        source, target = roles[number // 5 % 2]
        prompt = prompt_of(150, seed=1000 + number)
        ticket = source.complete(prompt, 1, kv_transfer_params=FOR_DECODE).params
        call = target.begin(prompt, NUM_TOKENS, kv_transfer_params=ticket, stream=True)
        return list(call.stream()) == pair.alone(prompt) and ticket is not None

    def loads() -> list[float]:
        return [server.metric("kvbus_load_bytes_count") for server in roles[0]]

    roles: list[tuple[VllmServer, VllmServer]]
    roles = [(pair.prefill, pair.decode), (pair.decode, pair.prefill)]
    before = loads()
    with ThreadPoolExecutor(4) as threads:
        served = list(threads.map(handed, range(20)))

    assert served == [True] * 20
    assert [now - then for now, then in zip(loads(), before, strict=True)] == [10, 10]
