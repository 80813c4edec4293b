"""Small pages to large ones, prompts cut into chunks and cached, memory mapped: whatever happens to
a handoff, decode says what SGLang says alone, and nothing is left of it.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvbus.engine import AgentRole, Link, RankMemory
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout, StatePart, state_group
from tests.e2e.sglang.clusters import (
    CHUNK_TOKENS,
    GIVES_UP_S,
    NUM_TOKENS,
    SETTLES_WITHIN_S,
    Cluster,
    log_probabilities,
    num_completed,
    prompt_of,
)
from tests.e2e.sglang.conftest import Alone, ServerAlone
from tests.e2e.sglang.routers import ROUTERS, router_before
from tests.e2e.sglang.servers import RefusedError, ask
from tests.support.agents import wait_until

CLUSTER = "ranks"
LENGTHS = (1, 15, 16, 17, 63, 64, 65, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 700)
SEEDS = count(1000)


@pytest.fixture(scope="module", autouse=True)
def _mapped(running: Cluster) -> Iterator[None]:
    running.restart(running.decode_agent, mapped=True)
    yield
    running.restart(running.decode_agent, mapped=False)


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


def test_prompt_cached_on_both_sides_is_handed_off_again(pair: Cluster, alone: Alone) -> None:
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


def test_first_token_logprobs_equal_sglang_alone(
    pair: Cluster, server_alone: ServerAlone, alone: Alone
) -> None:
    prompt = prompt_of(130, seed=70)
    asked = {"return_logprob": True, "top_logprobs_num": 3}
    expected = server_alone("gqa").begin(prompt, NUM_TOKENS, **asked).answer()

    calls = pair.begin(prompt, **pair.room(), **asked)
    said = [call.answer() for call in calls][1]

    (values, tokens), (expected_values, expected_tokens) = map(log_probabilities, (said, expected))
    assert tokens == expected_tokens
    assert values == pytest.approx(expected_values, abs=1e-4)


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


def test_decode_hears_at_once_of_prefill_abort_before_compute(pair: Cluster, alone: Alone) -> None:
    busy = [pair.begin(prompt_of(1500, seed=420 + number)) for number in range(3)]
    room, prompt = pair.room(), prompt_of(40, seed=410)
    leaves = pair.prefill.begin(prompt, NUM_TOKENS, **room, rid="leaves")
    stays = pair.decode.begin(prompt, NUM_TOKENS, **room)

    started = time.monotonic()
    pair.prefill.post("/abort_request", {"rid": "leaves"})

    with pytest.raises(RefusedError, match="kvbus: "):
        stays.tokens()
    assert time.monotonic() - started < GIVES_UP_S
    with pytest.raises(RefusedError):
        leaves.tokens()
    for call in (one for both in busy for one in both):
        call.tokens()
    works_again(pair, alone)


LAYERS = GroupSpec(
    name="full",
    layers=(0, 1, 2, 3),
    block_size=16,
    num_kv_heads=4,
    head_dim=64,
    dtype="float32",
)
ROWS = state_group("metadata", (3,), (StatePart("output_ids", 1, 32),), optional=True)
STRANGERS = {
    "model": EngineSpec("another model", "another", 1, (LAYERS,)),
    "dtype": EngineSpec("another dtype", "model", 1, (replace(LAYERS, dtype="bfloat16"),)),
    "metadata": EngineSpec("other metadata", "model", 1, (LAYERS, ROWS)),
}
"""By what a refusal names."""


@pytest.mark.parametrize("named", STRANGERS)
def test_what_an_unlike_engine_prefilled_is_refused_by_name(
    pair: Cluster, alone: Alone, named: str
) -> None:
    spec = STRANGERS[named]
    memory = RankMemory.allocate(spec, 0, KvLayout.parse("NHD"), num_blocks=8)
    attach = Path(pair.prefill_agent.settings["runtime_dir"], "attach.sock")
    room = {"bootstrap_host": "kvbus", "bootstrap_room": next(SEEDS)}
    blocks = {group.name: [1] if group.state else [1, 2, 3] for group in spec.groups}

    with Link(attach, spec, memory=memory, role=AgentRole.PREFILL) as link:
        offer = link.offer(named, num_tokens=40, block_ids=blocks)
        given = {"ticket": offer.ticket, "first_token": 5}
        sampling = {"max_new_tokens": 4, "custom_params": {"kvbus": given}}
        with pytest.raises(RefusedError, match=rf"engines differ in \S*{named}"):
            pair.decode.generate(prompt_of(40, seed=9), 4, sampling_params=sampling, **room)
        offer.withdraw()

    memory.close()
    assert "kvbus: engines differ in" in pair.decode.log()
    works_again(pair, alone)


@pytest.mark.kind("requests that decode retracts for new weights", on="servers")
def test_request_that_decode_retracts_continues_where_it_was(
    pair: Cluster, server_alone: ServerAlone
) -> None:
    """Prefill computes its tokens again, as it does after an update of weights."""
    prompt, num_tokens = prompt_of(90, seed=430), 400
    before = num_completed(pair.decode_agent)
    room = pair.room()
    prefill = pair.prefill.begin(prompt, num_tokens, **room)
    decode = pair.decode.begin(prompt, num_tokens, **room)
    prefill.tokens()
    wait_until(lambda: num_completed(pair.decode_agent) == before + 1, "a handoff")

    assert pair.decode.post("/pause_generation", {"mode": "retract"}) == 200
    assert pair.decode.post("/continue_generation", {}) == 200

    assert decode.tokens() == server_alone("gqa").generate(prompt, num_tokens)
    assert num_completed(pair.decode_agent) == before + 2


def test_a_request_of_which_one_server_hears_fails_in_time(pair: Cluster, alone: Alone) -> None:
    prompt, started = prompt_of(40, seed=400), time.monotonic()
    calls = [server.begin(prompt, 4, **pair.room()) for server in (pair.prefill, pair.decode)]

    for call in calls:
        with pytest.raises(RefusedError):
            call.tokens()

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


def test_prefill_has_ended_before_decode_gets_the_requests(pair: Cluster, alone: Alone) -> None:
    prompts = [prompt_of(150, seed=700 + number) for number in range(6)]
    pair.restart(pair.prefill_agent, park_bytes=64 << 20, park_after_s=0.0)
    rooms = [pair.room() for _ in prompts]
    sent = list(zip(prompts, rooms, strict=True))
    first = [pair.prefill.begin(prompt, NUM_TOKENS, **room) for prompt, room in sent]
    begun = [call.tokens()[:1] for call in first]

    said = [pair.decode.begin(prompt, NUM_TOKENS, **room).tokens() for prompt, room in sent]

    assert said == [alone(prompt) for prompt in prompts]
    assert [tokens[:1] for tokens in said] == begun
    pair.restart(pair.prefill_agent, park_bytes=0, park_after_s=1.0)
