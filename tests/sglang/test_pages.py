"""Small pages to large ones, prompts cut into chunks and cached: whatever happens to a handoff,
decode says what SGLang says alone, and nothing is left of it.
"""

import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from tests.agents import wait_until
from tests.sglang.clusters import (
    CHUNK_TOKENS,
    GIVES_UP_S,
    NUM_TOKENS,
    SETTLES_WITHIN_S,
    Cluster,
    num_completed,
    prompt_of,
)
from tests.sglang.conftest import Alone
from tests.sglang.routers import ROUTERS, router_before
from tests.sglang.servers import RefusedError, ask

CLUSTER = "pages"
LENGTHS = (1, 15, 16, 17, 63, 64, 65, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 700)
SEEDS = count(1000)


def works_again(pair: Cluster, alone: Alone) -> None:
    """New requests are handed off within a bounded time."""

    def is_right() -> bool:
        prompt = prompt_of(100, next(SEEDS))
        try:
            return pair.handoff(prompt) == alone(prompt)
        except RefusedError:
            return False

    wait_until(is_right, "a handoff", SETTLES_WITHIN_S)


def test_decode_says_what_sglang_says_alone(pair: Cluster, alone: Alone) -> None:
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]

    said = [pair.handoff(prompt) for prompt in prompts]

    assert said == [alone(prompt) for prompt in prompts]
    assert pair.decode_agent.says("handoff.completed")[-1]["path"] == "mapped"


def test_a_prompt_that_both_sides_have_cached_is_handed_off_again(
    pair: Cluster, alone: Alone
) -> None:
    """Where decode has all pages the first token alone is handed over."""
    prompts = [prompt_of(length, seed=50 + length) for length in LENGTHS]
    first = [pair.handoff(prompt) for prompt in prompts]
    before = len(pair.decode_agent.says("handoff.completed"))

    said = [pair.handoff(prompt) for prompt in prompts]
    longer = [pair.handoff([*prompt, 7, 8, 9]) for prompt in prompts]

    assert said == first == [alone(prompt) for prompt in prompts]
    assert longer == [alone([*prompt, 7, 8, 9]) for prompt in prompts]
    again = pair.decode_agent.says("handoff.completed")[before : before + len(prompts)]
    assert again[-1]["num_bytes"] < again[0]["num_bytes"] * 100


@pytest.mark.parametrize("router", ROUTERS)
def test_sglangs_own_routers_hand_off_as_they_are(
    pair: Cluster, alone: Alone, router: str, tmp_path: Path
) -> None:
    prompts = [prompt_of(90 * number + 5, seed=600 + number) for number in range(8)]
    before = num_completed(pair.decode_agent)

    log, at = tmp_path / "log", pair.bootstrap_port
    with router_before(pair.prefill, pair.decode, at, router, log) as port:
        calls = [ask(port, prompt, NUM_TOKENS) for prompt in prompts]
        said = [call.tokens() for call in calls]

    assert said == [alone(prompt) for prompt in prompts]
    assert num_completed(pair.decode_agent) == before + len(prompts)


def test_many_at_once_do_not_disturb_each_other(pair: Cluster, alone: Alone) -> None:
    prompts = [prompt_of(20 * number + 1, seed=200 + number) for number in range(20)]

    said = list(pair.threads.map(pair.handoff, prompts))

    assert said == [alone(prompt) for prompt in prompts]


@pytest.mark.parametrize("gone", ["prefill", "decode"])
def test_of_a_client_that_hangs_up_nothing_is_left(pair: Cluster, alone: Alone, gone: str) -> None:
    for number in range(6):
        calls = pair.begin(prompt_of(600, seed=300 + number + 10 * len(gone)))
        leaves, stays = calls if gone == "prefill" else reversed(calls)
        time.sleep(0.02 * number)
        leaves.abort()
        with suppress(RefusedError):
            stays.tokens()

    works_again(pair, alone)


@pytest.mark.parametrize("only", ["prefill", "decode"])
def test_a_request_of_one_leg_fails_in_time(pair: Cluster, alone: Alone, only: str) -> None:
    server = pair.prefill if only == "prefill" else pair.decode
    started = time.monotonic()

    with pytest.raises(RefusedError):
        server.generate(prompt_of(40, seed=400), 4, **pair.room())

    assert time.monotonic() - started < 3 * GIVES_UP_S
    works_again(pair, alone)


def test_a_room_that_is_used_twice_fails_and_no_tokens_are_wrong(
    pair: Cluster, alone: Alone
) -> None:
    room, prompts = pair.room(), [prompt_of(40, seed=500), prompt_of(40, seed=501)]
    first = [call.tokens() for call in pair.begin(prompts[0], **room)]

    second = []
    for call in pair.begin(prompts[1], **room):
        try:
            second.append(call.tokens())
        except RefusedError:
            second.append([])

    assert first[1] == alone(prompts[0])
    assert second[1] in ([], alone(prompts[1]))
    works_again(pair, alone)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_servers_go_on_with_the_next_agent(pair: Cluster, alone: Alone, role: str) -> None:
    killed = pair.prefill_agent if role == "prefill" else pair.decode_agent
    calls = [pair.begin(prompt_of(500, seed=600 + number)) for number in range(4)]

    killed.kill()

    for call in (one for both in calls for one in both):
        with suppress(RefusedError):
            call.tokens()
    killed.start()
    works_again(pair, alone)
