"""Clients of routers get what decode says alone, and leave nothing when they hang up.

What cannot be loaded is an error here, and the only one. Large blocks go to small ones.
"""

import signal
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.vllm.calls import Call, Completion, RefusedError, ask, ask_in_words, chat
from tests.e2e.vllm.clusters import (
    ALL_THE_SAME,
    CHUNK_TOKENS,
    NUM_TOKENS,
    Cluster,
    halted,
    prompt_of,
)
from tests.e2e.vllm.routers import ROUTERS, is_there
from tests.e2e.vllm.tickets import WRONG
from tests.support.agents import wait_until

CLUSTER = "routed"
LONG = 3000


@pytest.fixture(params=ROUTERS)
def name(request: pytest.FixtureRequest) -> str:
    if not is_there(request.param):
        pytest.skip(f"{request.param} is not installed here: make test-vllm runs this")
    router: str = request.param
    return router


@pytest.fixture
def port(pair: Cluster, name: str) -> int:
    """That of each router in turn, before the servers of the pair."""
    return pair.router(name)


@pytest.fixture
def seed(name: str) -> int:
    """Prompts that the test with another router has not had: they would be cached."""
    return 1000 * (1 + list(ROUTERS).index(name))


def test_clients_at_the_same_time_get_what_decode_says_alone(
    pair: Cluster, port: int, seed: int
) -> None:
    prompts = [prompt_of(40 + 80 * number, seed=seed + number) for number in range(5)]
    chatted = prompt_of(CHUNK_TOKENS + 50, seed=seed + 20)
    before = pair.decode.from_elsewhere()

    calls = [ask_in_words(port, [prompt], NUM_TOKENS) for prompt in prompts]
    streamed = list(chat(port, chatted, NUM_TOKENS, stream=True).stream())
    said = [call.completion().tokens for call in calls]

    assert [*said, streamed] == [pair.alone(prompt) for prompt in (*prompts, chatted)]
    loaded = sum(len(prompt) for prompt in (*prompts, chatted))
    assert pair.decode.from_elsewhere() - before == loaded


def test_router_hands_off_several_prompts_or_sequences_once(
    pair: Cluster, port: int, seed: int, name: str
) -> None:
    """Smg and the proxy send several sequences to the decode server alone, it several prompts."""
    prompt = prompt_of(CHUNK_TOKENS + 50, seed=seed + 25)
    prompts = [prompt_of(200 + number, seed=seed + 30 + number) for number in range(3)]
    loaded = [pair.decode.from_elsewhere()]

    of_one = ask_in_words(port, [prompt], NUM_TOKENS, **ALL_THE_SAME).sequences()
    loaded.append(pair.decode.from_elsewhere())
    of_several = ask_in_words(port, prompts, NUM_TOKENS).sequences()
    loaded.append(pair.decode.from_elsewhere())

    assert of_one == 3 * [pair.alone(prompt)]
    assert of_several == [pair.alone(each) for each in prompts]
    assert loaded[1] - loaded[0] == (len(prompt) if name == "vllm-router" else 0)
    assert loaded[2] - loaded[1] == (0 if name == "proxy" else len(prompts[0]))


def test_client_hanging_up_at_any_moment_leaves_nothing(
    pair: Cluster, port: int, seed: int
) -> None:
    call = ask_in_words(port, [prompt_of(LONG, seed=seed + 40)], NUM_TOKENS)
    wait_until(pair.reading, "prefill has begun")
    call.abort()
    pair.check()

    ended = pair.prefill.metric("request_success_total")
    with halted([pair.decode_agent.pid]):
        call = ask_in_words(port, [prompt_of(LONG, seed=seed + 50)], NUM_TOKENS)
        wait_until(lambda: pair.prefill.metric("request_success_total") > ended, "a prefill")
        wait_until(lambda: pair.decode.metric("num_requests_waiting"), "decode has it")
        call.abort()
    pair.check()

    call = chat(port, prompt_of(300, seed=seed + 60), LONG, stream=True, min_tokens=LONG)
    next(call.stream())
    call.abort()
    pair.check()


@pytest.mark.parametrize("length", [1, 31, 64, 900])
def test_decode_continues_after_prefills_token_without_prefill(pair: Cluster, length: int) -> None:
    prompt = prompt_of(length, seed=4000 + length)
    first = pair.prefill.complete(prompt, 1, kv_transfer_params={"do_remote_decode": True})
    before = pair.decode.from_elsewhere()

    rest = pair.decode.complete(
        [*prompt, *first.tokens], NUM_TOKENS - 1, kv_transfer_params=first.params
    )

    assert pair.decode.from_elsewhere() - before == length
    assert [*first.tokens, *rest.tokens] == pair.alone(prompt)


def test_trace_of_proxy_client_is_known_to_both_agents(pair: Cluster) -> None:
    trace = f"00-{uuid.uuid4().hex}-{uuid.uuid4().hex[:16]}-01"
    pair.decode_agent.skip_log()

    call = ask(pair.router("proxy"), prompt_of(100, 9), NUM_TOKENS, headers={"traceparent": trace})
    call.completion()

    request_id = pair.decode_agent.says("handoff.completed")[-1]["request_id"]
    for agent in (pair.prefill_agent, pair.decode_agent):
        spans = agent.trace(request_id=request_id)
        assert spans[0]["attributes"]["traceparent"] == trace
    waited = next(span for span in spans if span["name"] == "pending")
    asked = next(span for span in spans if span["name"] == "sending")
    assert waited["start_s"] < waited["end_s"] == asked["start_s"]


def status(call: Call) -> int:
    """The HTTP status of the answer."""
    try:
        call.completion()
    except RefusedError as error:
        return error.status
    return 200


def test_wrong_ticket_is_error_and_requests_beside_it_are_served(
    pair: Cluster,
) -> None:
    kinds = ("with another secret", "nothing but what routers look at")
    prompts = [prompt_of(length, seed=100 + length) for length in (31, 32, 64, 65, 1000)]
    tickets = [pair.ticket(prompt) for prompt in prompts]
    before = pair.moved()

    wrong = [pair.begin(prompts[-1], WRONG[kind](tickets[-1]), cache_salt=kind) for kind in kinds]
    stream = pair.begin(prompts[-1], {"do_remote_prefill": True}, stream=True, cache_salt="stream")
    right = [pair.begin(*each) for each in zip(prompts, tickets, strict=True)]
    without = pair.begin(prompts[-1], None, cache_salt="without")

    assert [status(call) for call in wrong] == [500, 500]
    with pytest.raises(RefusedError):
        list(stream.stream())
    said = [call.completion().tokens for call in right]
    assert said == [pair.alone(prompt) for prompt in prompts]
    assert without.completion().tokens == said[-1]
    assert pair.moved() > before


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_kill_of_an_agent_under_load_fails_no_request(pair: Cluster, role: str) -> None:
    """Half of the requests wait for KV at the kill, the other half is anywhere."""
    seed = 6000 + 1000 * len(role)
    prompts = [prompt_of(40 + 10 * number, seed=seed + number) for number in range(48)]
    killed = pair.prefill_agent if role == "prefill" else pair.decode_agent
    before = pair.decode.from_elsewhere()

    calls = pair.stuck(prompts[::2])
    soon = [pair.soon(prompt) for prompt in prompts[1::2]]
    killed.kill()
    if role == "decode":
        pair.prefill_agent.signal(signal.SIGCONT)
    killed.start()

    said = [status_or_tokens(call.completion) for call in calls]
    said += [status_or_tokens(one.result) for one in soon]
    failed = [one for one in said if isinstance(one, RefusedError)]
    assert not failed, f"{len(failed)} of {len(said)}: {failed[0]}"
    tokens = [one.tokens if isinstance(one, Completion) else one for one in said]
    assert tokens == [pair.alone(prompt) for prompt in (*prompts[::2], *prompts[1::2])]
    assert pair.decode.from_elsewhere() - before >= sum(map(len, prompts[::2]))


def status_or_tokens(answer: Callable[[], Completion | list[int]]) -> Any:
    """The answer, or the error in its place."""
    try:
        return answer()
    except RefusedError as error:
        return error


@pytest.fixture
def without_prefill(pair: Cluster) -> Cluster:
    """The last of this module: the prefill server does not come back."""
    for name in filter(is_there, ROUTERS):
        pair.router(name)
    pair.prefill.stop()
    return pair


def test_without_prefill_server_routers_fail_and_proxy_decodes(
    without_prefill: Cluster,
) -> None:
    pair, prompt = without_prefill, prompt_of(300, seed=300)

    calls = {
        name: ask_in_words(pair.router(name), [prompt], NUM_TOKENS)
        for name in filter(is_there, ROUTERS)
    }

    assert calls.pop("proxy").completion().tokens == pair.alone(prompt)
    assert all(status(call) >= 500 for call in calls.values())
