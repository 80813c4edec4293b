"""Conversations that the router of `examples` moves between two pairs of servers, with their KV.

Each pair has an agent of each kind. A load that fails is an error: no server computes instead.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvbus.spawn import Child, free_port
from tests.e2e.vllm.calls import converse, post, user_says
from tests.e2e.vllm.clusters import (
    FOR_DECODE,
    LARGER,
    NUM_TOKENS,
    SMALLER,
    Shape,
    Side,
    knows_its_engines,
    prompt_of,
    server_of,
)
from tests.e2e.vllm.servers import VllmServer
from tests.support.agents import Agents, agents_ended, wait_logged, wait_until

ROUTER = Path(__file__).parents[3] / "examples/moving_router.py"
STARTS_WITHIN_S = 60.0
NUM_FIRST, NUM_NEW = 400, 50
NUM_COMPUTED = 1 + NUM_NEW
"""Tokens of a turn that no server has computed: no answer has the KV of its last token."""
WORDS = ("--no-skip-tokenizer-init",)
SHAPE = Shape(
    Side("0", block_size=SMALLER, flags=WORDS),
    Side("1", block_size=LARGER, flags=WORDS),
    policy="fail",
    turns={"bidirectional_kv_xfer": True},
)
POOL: dict[str, Any] = {"park_bytes": 64 << 20, "park_after_s": 0.2}


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server, and how many tokens the former computed and loaded."""

    prefill: VllmServer
    decode: VllmServer

    def figures(self) -> tuple[float, float]:
        source = {"source": "local_compute"}
        computed = self.prefill.metric("prompt_tokens_by_source_total", **source)
        return computed, self.prefill.from_elsewhere()

    def redeem(self, prompt: Sequence[int], params: object) -> list[int]:
        return self.decode.complete(prompt, NUM_TOKENS, kv_transfer_params=params).tokens

    def alone(self, prompt: Sequence[int]) -> list[int]:
        return self.decode.complete(prompt, NUM_TOKENS, cache_salt="alone").tokens


@dataclass(frozen=True)
class Moving:
    """Two pairs behind one router; the prefill agent of the first one has a pool."""

    agents: Agents
    pairs: tuple[Pair, Pair]
    port: int

    def use_only(self, number: int) -> None:
        """Have the router use one pair alone."""
        post(self.port, f"/pairs/{number}/open", {})
        post(self.port, f"/pairs/{1 - number}/close", {})

    def begin(self, seed: int) -> "Conversation":
        """Return a conversation whose first question is waiting."""
        return Conversation(self, [user_says(prompt_of(NUM_FIRST, seed))])


@dataclass
class Conversation:
    at: Moving
    messages: list[dict[str, str]]

    def turn(self) -> int:
        """Have the router answer as one vLLM does, and add another question; the pair's number."""
        port = self.at.pairs[1].decode.port
        expected = converse(port, self.messages, NUM_TOKENS, cache_salt="alone")
        call = converse(self.at.port, self.messages, NUM_TOKENS)
        response = call.connection.getresponse()
        body = response.read()
        assert response.status == 200, body
        (choice,), (alone,) = json.loads(body)["choices"], expected.whole()["choices"]
        assert choice["token_ids"] == alone["token_ids"]
        answer = {"role": "assistant", "content": choice["message"]["content"]}
        self.messages += [answer, user_says(prompt_of(NUM_NEW, seed=len(self.messages)))]
        return int(response.headers["x-pair"])


@pytest.fixture(scope="module")
def moving(models: Path) -> Iterator[Moving]:
    with agents_ended(Agents) as agents, ExitStack() as stack:
        pairs = []
        for settings in (POOL, {}):
            beside = agents.prepare("prefill", **settings), agents.prepare("decode")
            prefill = server_of(beside, SHAPE.prefill, SHAPE, models)
            pairs.append(Pair(prefill, server_of(beside[::-1], SHAPE.decode, SHAPE, models)))
        agents.start(*agents.all)
        servers = [server for pair in pairs for server in (pair.prefill, pair.decode)]
        for server in servers:
            stack.callback(server.stop)
            server.launch()
        port = free_port()
        command = [sys.executable, str(ROUTER), "--port", str(port)]
        for pair in pairs:
            command += ["--pair", f"{pair.prefill.url},{pair.decode.url}"]
        router = stack.enter_context(Child.start("router", command, log=agents.folder / "router"))
        wait_logged(router, "Uvicorn running", STARTS_WITHIN_S)
        for server in servers:
            server.wait_started()
        for agent in agents.all:
            wait_until(partial(knows_its_engines, agent, 2), f"the {agent.role} agent is ready")
        yield Moving(agents, (pairs[0], pairs[1]), port)
        assert not [line for agent in agents.all for line in agent.trouble()]


def test_conversation_moves_to_another_pair_with_its_kv(moving: Moving) -> None:
    talk = moving.begin(seed=1)

    moving.use_only(1)
    assert talk.turn() == 1
    post(moving.port, "/pairs/0/open", {})
    assert talk.turn() == 1  # the pair of the last turn comes first
    moving.use_only(0)
    assert talk.turn() == 0

    num_tokens = NUM_FIRST + 2 * (NUM_TOKENS + NUM_NEW)
    assert moving.pairs[0].figures() == (NUM_COMPUTED, num_tokens - NUM_COMPUTED)


def test_a_prefill_server_loads_the_prefix_of_another(moving: Moving) -> None:
    prefix = prompt_of(300, seed=2)
    prompt = [*prefix, *prompt_of(NUM_NEW, seed=3)]
    first, second = moving.pairs
    computed, loaded = second.figures()

    offers = {**FOR_DECODE, "readers": 2}
    params = first.prefill.complete(prefix, 1, kv_transfer_params=offers).params
    assert params is not None
    loads = {**params, "do_remote_decode": True, "do_remote_prefill": False}
    longer = second.prefill.complete(prompt, 1, kv_transfer_params=loads).params

    assert second.figures() == (computed + NUM_NEW, loaded + len(prefix))
    assert second.redeem(prompt, longer) == second.alone(prompt)
    assert first.redeem(prefix, params) == second.alone(prefix)


def test_parked_conversation_moves_after_both_servers_have_ended(moving: Moving) -> None:
    """The last of this module: the servers of the first pair do not come back."""
    talk, (old, new) = moving.begin(seed=4), moving.pairs
    moving.use_only(0)
    assert talk.turn() == 0
    computed, loaded = new.figures()
    pooled = partial(moving.agents.all[0].metric, "parked_offers")
    wait_until(lambda: pooled() > 0, "the answer is parked")
    old.prefill.stop()
    old.decode.stop()

    moving.use_only(1)
    assert talk.turn() == 1

    assert new.figures() == (computed + NUM_COMPUTED, loaded + NUM_FIRST + NUM_TOKENS - 1)
