"""Turn 2 of a conversation: prefill reads what decode has kept of turn 1, and computes the rest.

Each server has an agent of each kind, so that each request chooses what it does.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from tests.agents import wait_until
from tests.vllm.calls import RefusedError
from tests.vllm.clusters import FOR_DECODE, NUM_TOKENS, Cluster, prompt_of
from tests.vllm.models import LONGEST
from tests.vllm.proxies import proxy_before
from tests.vllm.servers import VllmServer
from tests.vllm.shapes import LARGER, TURNS
from tests.vllm.tickets import WRONG
from tests.vllm.turns import ANSWER, alone, computed, last_turn, turn

SHAPE = TURNS
SHORT = 30
"""With its answer less than what is worth a load."""


def test_prefill_computes_only_what_is_new(pair: Cluster) -> None:
    first = turn(pair, prompt_of(2048 + 1 - ANSWER, seed=1))
    prompt = first.then(256, seed=2)
    before = computed(pair.prefill)

    # Neither side finds turn 1 in its prefix cache.
    answer = last_turn(pair, prompt, first.params, cache_salt="another")

    assert computed(pair.prefill) - before == 256 + 1  # nobody has computed the last of turn 1
    assert answer == alone(pair, prompt)


@pytest.mark.parametrize("num_tokens", [200, 4 * LARGER + 1 - ANSWER, 333])
def test_each_turn_says_what_decode_says_alone(pair: Cluster, num_tokens: int) -> None:
    first = turn(pair, prompt_of(num_tokens, seed=10 + num_tokens))
    second = turn(pair, first.then(50, seed=20 + num_tokens), first.params)
    third = second.then(1, seed=30 + num_tokens)
    before = computed(pair.prefill)

    answer = last_turn(pair, third, second.params)

    assert [second.answer, answer] == [alone(pair, second.prompt), alone(pair, third)]
    assert computed(pair.prefill) - before <= 1 + 1 + LARGER


def test_the_proxy_brings_the_last_turn_of_a_conversation(pair: Cluster) -> None:
    name = {"conversation_id": "a conversation"}
    prompt = prompt_of(300, seed=35)
    with proxy_before(pair) as proxy:
        first = proxy.begin(prompt, ANSWER, **name).completion()
        prompt = [*prompt, *first.tokens, *prompt_of(50, seed=36)]
        before = computed(pair.prefill)

        call = proxy.begin(prompt, ANSWER, stream=True, cache_salt="by proxy", **name)
        answer = list(call.stream())

    assert answer == alone(pair, prompt)
    assert computed(pair.prefill) - before == 50 + 1


def test_a_turn_that_both_servers_get_at_once_reads_the_last_one(pair: Cluster) -> None:
    first = turn(pair, prompt_of(300, seed=37))
    assert first.params is not None
    prompt, before = first.then(500, seed=38), computed(pair.prefill)
    to_decode, to_prefill = pair.meeting()

    decode = pair.begin(prompt, to_decode, stream=True, cache_salt="met")
    asked = {**to_prefill, **first.params}
    pair.prefill.complete(prompt, 1, kv_transfer_params=asked, cache_salt="met")

    assert list(decode.stream()) == pair.alone(prompt)
    assert computed(pair.prefill) - before == 500 + 1


def test_what_prefill_has_cached_is_not_read_again(pair: Cluster) -> None:
    first = turn(pair, prompt_of(1000, seed=40))
    prompt = first.then(50, seed=41)
    before = pair.prefill.metric("prompt_tokens_by_source_total", source="external_kv_transfer")

    answer = last_turn(pair, prompt, first.params)

    after = pair.prefill.metric("prompt_tokens_by_source_total", source="external_kv_transfer")
    assert after - before <= ANSWER + LARGER
    assert answer == alone(pair, prompt)


@pytest.mark.parametrize("kind", WRONG)
def test_prefill_computes_the_conversation_of_a_wrong_ticket(pair: Cluster, kind: str) -> None:
    first = turn(pair, prompt_of(200, seed=list(WRONG).index(kind)))
    assert first.params is not None
    prompt = first.then(50, seed=100)
    wrong = WRONG[kind](first.params) | {"do_remote_decode": True, "do_remote_prefill": False}
    before = computed(pair.prefill)

    answer = last_turn(pair, prompt, wrong, cache_salt=kind)

    assert answer == alone(pair, prompt)
    assert computed(pair.prefill) - before == len(prompt)
    last_turn(pair, prompt, first.params)


def test_prefill_computes_the_conversation_of_a_ticket_that_has_expired(pair: Cluster) -> None:
    first = turn(pair, prompt_of(300, seed=50))
    prompt, before = first.then(50, seed=51), computed(pair.prefill)
    wait_until(pair.agent_of_answers.idle, "the offer has expired")

    answer = last_turn(pair, prompt, first.params, cache_salt="expired")

    assert answer == alone(pair, prompt)
    assert computed(pair.prefill) - before == len(prompt)


def test_prefill_computes_the_conversation_when_the_agent_beside_decode_was_killed(
    pair: Cluster,
) -> None:
    first = turn(pair, prompt_of(300, seed=60))
    prompt = first.then(50, seed=61)
    pair.agent_of_answers.kill()

    answer = last_turn(pair, prompt, first.params, cache_salt="killed")
    pair.agent_of_answers.start()

    assert answer == alone(pair, prompt)
    seeds = count(62)
    wait_until(
        lambda: turn(pair, prompt_of(100, seed=next(seeds))).params is not None,
        "decode offers again",
        60.0,
    )


def test_the_ticket_of_another_conversation_is_not_used(pair: Cluster) -> None:
    first, other = (turn(pair, prompt_of(300, seed=seed)) for seed in (70, 71))
    prompt = first.then(50, seed=72)
    before = computed(pair.prefill)

    answer = last_turn(pair, prompt, other.params, cache_salt="other")

    assert answer == alone(pair, prompt)
    assert computed(pair.prefill) - before == len(prompt)


@pytest.mark.parametrize("kept", [100, 300, 300 + ANSWER - 1])
def test_a_conversation_whose_past_was_changed_is_computed(pair: Cluster, kept: int) -> None:
    first = turn(pair, prompt_of(300, seed=80 + kept))
    prompt = [*first.said[:kept], *prompt_of(50, seed=81)]

    answer = last_turn(pair, prompt, first.params, cache_salt="changed")

    assert answer == alone(pair, prompt)


def test_what_is_not_worth_a_load_is_computed_and_decode_has_its_blocks_back(
    pair: Cluster,
) -> None:
    pair.agent_of_answers.skip_log()
    first = turn(pair, prompt_of(SHORT, seed=90))
    prompt = first.then(50, seed=91)
    before = computed(pair.prefill)

    answer = last_turn(pair, prompt, first.params, cache_salt="short")

    assert answer == alone(pair, prompt)
    assert computed(pair.prefill) - before == len(prompt)
    assert pair.agent_of_answers.says("offer.released", outcome="completed")


def test_turns_that_end_by_a_stop_token_go_on(pair: Cluster) -> None:
    prompt = prompt_of(300, seed=110)
    stop = alone(pair, prompt)[5]
    first = turn(pair, prompt, stop_token_ids=[stop])
    further = first.then(50, seed=111)
    said = alone(pair, further)

    # Prefill's own token is the one to stop at.
    second = turn(pair, further, first.params, stop_token_ids=[said[0]])
    answer = last_turn(pair, second.then(50, seed=112), second.params)

    assert first.answer[-1] == stop
    assert second.answer == said[:1]
    assert answer == alone(pair, second.then(50, seed=112))


def test_a_prefill_request_that_is_refused_leaves_nothing(pair: Cluster) -> None:
    first = turn(pair, prompt_of(300, seed=120))

    with pytest.raises(RefusedError):
        turn(pair, first.then(LONGEST, seed=121), first.params)


def test_a_prefill_request_that_hangs_up_leaves_nothing(pair: Cluster) -> None:
    first = turn(pair, prompt_of(1000, seed=130))
    prompt = first.then(1000, seed=131)

    call = pair.prefill.begin(prompt, 1, kv_transfer_params=first.params, cache_salt="gone")
    call.abort()

    assert last_turn(pair, prompt) == alone(pair, prompt)


def test_a_stream_keeps_nothing(pair: Cluster) -> None:
    prompt = prompt_of(300, seed=140)
    pair.agents.check()

    assert last_turn(pair, prompt) == alone(pair, prompt)

    assert pair.agent_of_answers.idle()


def test_servers_that_change_their_roles_fail_no_request(pair: Cluster) -> None:
    numbers = count(1000)

    def handed(source: VllmServer, target: VllmServer) -> bool:
        prompt = prompt_of(150, seed=next(numbers))
        ticket = source.complete(prompt, 1, kv_transfer_params=FOR_DECODE).params
        call = target.begin(prompt, NUM_TOKENS, kv_transfer_params=ticket, stream=True)
        return list(call.stream()) == pair.alone(prompt) and ticket is not None

    roles = [(pair.prefill, pair.decode), (pair.decode, pair.prefill)]
    before = [server.metric("kvbus_load_bytes_count") for server in roles[0]]
    with ThreadPoolExecutor(4) as threads:
        served = list(threads.map(lambda number: handed(*roles[number // 5 % 2]), range(20)))

    after = [server.metric("kvbus_load_bytes_count") for server in roles[0]]
    assert served == [True] * 20
    assert [now - then for now, then in zip(after, before, strict=True)] == [10, 10]
