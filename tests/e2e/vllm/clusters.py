"""Clusters: a prefill and a decode vLLM, the agents beside them, and a router's part between them.

What a server did is read from its answers, its metrics and its log. A start takes half a minute of
all cores: tests of one cluster are one module, which starts it once, and ends it.
"""

import base64
import json
import os
import random
import secrets
import signal
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from kvbus.protocol import Role
from tests.e2e.vllm.calls import Call
from tests.e2e.vllm.models import EAGLE, VOCABULARY
from tests.e2e.vllm.routers import router_before
from tests.e2e.vllm.servers import VllmServer
from tests.support.agents import AgentProcess, Agents, agents_ended, wait_until
from tests.support.keyring import KeyRing

NUM_TOKENS = 12
SETTLES_WITHIN_S = 60.0
CHUNK_TOKENS = 256
SMALLER, LARGER = 32, 64
FEW_BLOCKS = 24
EVENTS = "ipc://{folder}/events"
"""Where the servers of "features" publish events of their caches."""
ALL_THE_SAME = {"n": 3, "temperature": 0.01, "top_k": 1}
"""Several sequences, which vLLM refuses where it is told to be greedy."""

FOR_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What routers for vLLM's own connector send with a prefill request, empty fields included."""

_SALTS = count()


@dataclass(frozen=True)
class Side:
    """One server, and the settings of its agent; ``model`` is one of `models.CONFIGS`."""

    cores: str
    model: str = "gqa"
    tp: int = 1
    dp: int = 1
    block_size: int | None = None
    flags: Sequence[str] = ()
    drafts: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's speculative configuration; ``model`` is a folder of the models."""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """Both sides, and what vLLM does with a request whose KV could not be loaded.

    With ``alias`` the servers call kvbus' connector `NixlConnector`. With ``multi`` it, vLLM's
    `OffloadingConnector` and `ExampleConnector` are children of `MultiConnector`. ``turns`` is what
    the options say of conversations: then each server has an agent of each kind, and all agents
    have CURVE keys and sign their tickets.
    """

    prefill: Side
    decode: Side
    policy: str = "recompute"
    alias: bool = False
    multi: bool = False
    turns: Mapping[str, Any] = field(default_factory=dict)


_CHUNKED = ("--max-num-batched-tokens", str(CHUNK_TOKENS))
_ANY_DTYPE = ("--attention-backend", "CPU_MLA")
_WORDS = ("--no-skip-tokenizer-init",)
_IN_WORDS = (*_CHUNKED, *_WORDS)
_UNCACHED = (*_CHUNKED, "--no-enable-prefix-caching")
_FP8 = ("--kv-cache-dtype", "fp8")
_EAGLE = {"method": "eagle", "model": EAGLE, "num_speculative_tokens": 2}
_FEATURES = (
    *(*_WORDS, "--max-model-len", "1024", "--scheduling-policy", "priority"),
    *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "1", "--max-cpu-loras", "4"),
    *("--enable-prompt-embeds", "--lora-modules", "one={models}/one", "two={models}/two"),
    *("--kv-events-config", json.dumps({"enable_kv_cache_events": True, "endpoint": EVENTS})),
)
_FEW = (*_FEATURES, "--num-gpu-blocks-override", str(FEW_BLOCKS))
_EXPIRES = {"offer_ttl_s": 10.0}
"""For tickets that never reach the decode side's engine, as a client hung up too soon."""
_TIMES_OUT = {"fetch_timeout_s": 10.0}
CLUSTERS: Mapping[str, Shape] = {
    # Small blocks to large ones, prompts cut into chunks and cached. Memory is mapped, as it is for
    # users who have both servers on one machine; other clusters use NIXL.
    "up": Shape(
        Side("0", block_size=SMALLER, flags=_CHUNKED, settings=_EXPIRES),
        Side("1", block_size=LARGER, flags=_CHUNKED, settings={**_TIMES_OUT, "mapped": True}),
    ),
    # Large blocks to small ones; what cannot be loaded fails. Behind routers, of which one looks at
    # the connector's name; clients send words.
    "routed": Shape(
        Side("0", block_size=LARGER, flags=_IN_WORDS, settings=_EXPIRES),
        Side("1", block_size=SMALLER, flags=_IN_WORDS),
        policy="fail",
        alias=True,
    ),
    # Windows and all, in blocks of which prefill's are so small that it keeps less of a window; the
    # handoff goes to twice as many ranks, the next turn back. In float32, as everywhere: in
    # bfloat16 a model says other tokens at TP 2.
    "turns": Shape(
        Side("0", "hybrid", block_size=SMALLER, flags=_WORDS, settings=_EXPIRES),
        Side("0|1", "hybrid", tp=2, block_size=LARGER, flags=_WORDS),
        turns={"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 10.0, **_TIMES_OUT},
    ),
    # Beside other connectors, to twice as many ranks: what one rank reports is not the end then.
    "multi": Shape(
        Side("0", block_size=SMALLER, settings=_EXPIRES),
        Side("0|1", tp=2, block_size=LARGER, settings=_TIMES_OUT),
        multi=True,
    ),
    "fp8": Shape(
        Side("0", block_size=SMALLER, flags=_FP8, settings=_EXPIRES),
        Side("1", block_size=LARGER, flags=_FP8, settings=_TIMES_OUT),
    ),
    "drafts": Shape(
        Side("0", "drafted", block_size=SMALLER, drafts=_EAGLE, settings=_EXPIRES),
        Side("1", "drafted", block_size=LARGER, drafts=_EAGLE, settings=_TIMES_OUT),
    ),
    # Two engines of each server, each with a registration at the one agent.
    "ranks": Shape(
        Side("0|1", block_size=SMALLER, dp=2, settings=_EXPIRES),
        Side("0|1", block_size=LARGER, dp=2, settings=_TIMES_OUT),
    ),
    # The state of a request is in one block. Its group of channels for all heads is on both ranks
    # of decode. On CPUs, vLLM's Mamba 2 fails with a cache of prefixes.
    "mamba": Shape(
        Side("0", "mamba", flags=_UNCACHED, settings=_EXPIRES),
        Side("0|1", "mamba", tp=2, flags=_UNCACHED, settings=_TIMES_OUT),
    ),
    # Features of vLLM that requests choose. A decode cache so small that vLLM preempts.
    "features": Shape(
        Side("0", "spelled", block_size=SMALLER, flags=_FEATURES, settings=_EXPIRES),
        Side("1", "spelled", block_size=LARGER, flags=_FEW, settings=_TIMES_OUT),
    ),
    # By the attention that takes float32: vLLM prefers another one, where the machine has AMX.
    "mla": Shape(Side("0", "mla", flags=_ANY_DTYPE), Side("1", "mla", flags=_ANY_DTYPE)),
}


@dataclass
class Cluster:
    """Both sides of a deployment, and requests through them."""

    agents: Agents
    prefill: VllmServer
    decode: VllmServer
    stack: ExitStack
    repeats_itself: bool
    """Whether decode says the same when it finds the beginning of a prompt in its cache."""
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=32))
    _ports: dict[str, int] = field(default_factory=dict)
    _said: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @property
    def prefill_agent(self) -> AgentProcess:
        return self.agents.all[0]

    @property
    def decode_agent(self) -> AgentProcess:
        return self.agents.all[1]

    def params(self, prompt: Sequence[int]) -> dict[str, Any] | None:
        """Have ``prompt`` prefilled; the ``kv_transfer_params`` of the answer."""
        return self.prefill.complete(prompt, 1, kv_transfer_params=FOR_DECODE).params

    def ticket(self, prompt: Sequence[int]) -> dict[str, Any]:
        """`params`, which must be there."""
        params = self.params(prompt)
        assert params is not None, "the prefill answered without kv_transfer_params"
        return params

    def begin(self, prompt: Sequence[int], ticket: object, **fields: Any) -> Call:
        """Send the decode request of a ticket."""
        return self.decode.begin(prompt, NUM_TOKENS, kv_transfer_params=ticket, **fields)

    def redeem(self, prompt: Sequence[int], ticket: object, **fields: Any) -> list[int]:
        """`begin`, and the tokens of its answer."""
        return self.begin(prompt, ticket, **fields).completion().tokens

    def handoff(self, prompt: Sequence[int], **fields: Any) -> list[int]:
        """The tokens that decode says after prefill has read ``prompt``, if it could offer it."""
        return self.redeem(prompt, self.params(prompt), **fields)

    def soon(self, prompt: Sequence[int]) -> Future[list[int]]:
        """A `handoff` beside others."""
        return self.threads.submit(self.handoff, prompt)

    def stuck(self, prompts: Sequence[Sequence[int]]) -> list[Call]:
        """Decode requests whose fetches wait for the prefill agent, which is stopped."""
        tickets = [self.ticket(prompt) for prompt in prompts]
        self.prefill_agent.signal(signal.SIGSTOP)
        calls = [self.begin(*each) for each in zip(prompts, tickets, strict=True)]
        wait_until(lambda: self.under_way() == len(calls), "all fetches have begun")
        return calls

    def awaiting(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The ``kv_transfer_params`` for decode and for prefill of a request that both get."""
        name = uuid.uuid4().hex
        rendezvous = {"transfer_id": name, "endpoint": self.prefill_agent.peer, "request_id": "met"}
        to_decode = {"do_remote_prefill": True, "do_remote_decode": False, "rendezvous": rendezvous}
        return to_decode, {**FOR_DECODE, "transfer_id": name}

    def meet(self, prompt: Sequence[int], **fields: Any) -> tuple[Call, Call]:
        """Send both servers a prompt at the same time; the decode side's request, and prefill's."""
        to_decode, to_prefill = self.awaiting()
        return (
            self.begin(prompt, to_decode, **fields),
            self.prefill.begin(prompt, 1, kv_transfer_params=to_prefill),
        )

    def alone(self, prompt: Sequence[int]) -> list[int]:
        """The tokens that decode says after reading ``prompt`` itself, whatever it has cached."""
        salt = f"alone-{next(_SALTS)}"
        tokens = self.decode.complete(prompt, NUM_TOKENS, cache_salt=salt).tokens
        self._said[tuple(prompt)] = tokens
        return tokens

    def again(self, prompt: Sequence[int]) -> list[int]:
        """The tokens that decode says alone, where it may find in its cache what it once loaded."""
        return self.decode.complete(prompt, NUM_TOKENS).tokens

    def router(self, name: str) -> int:
        """The port of a router before both servers, which runs as long as they do."""
        if name not in self._ports:
            running = router_before(self.prefill, self.decode, name)
            self._ports[name] = self.stack.enter_context(running)
        return self._ports[name]

    def moved(self) -> float:
        """Bytes that the decode agent has read; an offer that is only released moves none.

        It counts them when a fetch ends, which is a little after its engine has the KV.
        """
        wait_until(lambda: not self.under_way(), "its fetches have ended", SETTLES_WITHIN_S)
        return self.decode_agent.metric("read_bytes_total")

    def under_way(self) -> int:
        """How many fetches the decode agent has."""
        return int(self.decode_agent.status()["counts"]["fetches"])

    def reading(self) -> int:
        """How many prompts the prefill side has begun."""
        return int(self.prefill_agent.status()["counts"]["offers"])

    @property
    def whole(self) -> bool:
        """Whether all of it runs."""
        servers_live = self.prefill.alive and self.decode.alive
        return servers_live and all(agent.alive for agent in self.agents.all)

    def check(self) -> None:
        """Nothing is left: no block in either server, no offer, lease or fetch in an agent.

        And what was loaded has left nothing wrong in decode's cache: each prompt is asked again.
        """
        said, self._said = self._said, {}
        for prompt, tokens in said.items() if self.repeats_itself else ():
            assert self.again(prompt) == tokens
        for server in (self.prefill, self.decode):
            if server.alive:
                wait_until(server.has_no_block_in_use, "no block in use", SETTLES_WITHIN_S)
        self.agents.check()


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """A random prompt; those of two seeds share no prefix that a server could cache."""
    chosen = random.Random(seed)
    return [chosen.randrange(3, VOCABULARY) for _ in range(num_tokens)]


def works_again(pair: Cluster, seed: int) -> None:
    """Return once a handoff moves KV; its tokens are right all the while.

    Prompts are of ``seed`` and what follows it.
    """
    seeds = count(seed)

    def moves() -> bool:
        prompt, before = prompt_of(100, seed=next(seeds)), pair.moved()
        assert pair.handoff(prompt) == pair.alone(prompt)
        return pair.moved() > before

    wait_until(moves, "a handoff that moves KV", SETTLES_WITHIN_S)


@contextmanager
def halted(pids: Sequence[int]) -> Iterator[None]:
    """These processes do nothing meanwhile."""
    assert pids, "no process to stop"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def cluster(name: str, models: Path, *, has_agents: bool = True) -> Iterator[Cluster]:
    """Start both sides side by side, and end them; without ``has_agents`` only the servers."""
    shape = CLUSTERS[name]
    with ExitStack() as stack:
        agents = stack.enter_context(agents_ended(Agents))
        _prepare(agents, shape)
        for agent in agents.all:
            agent.runs_first = True  # vLLM's workers spin while they wait, on all cores
        if has_agents:
            agents.start(*agents.all)
        prefill, decode = (
            server_of(agents.all[number::2], side, shape, models)
            for number, side in enumerate((shape.prefill, shape.decode))
        )
        made = Cluster(agents, prefill, decode, stack, repeats_itself=name != "mla")
        for server in (prefill, decode):
            stack.callback(server.stop)
            server.launch()
        stack.callback(made.threads.shutdown, cancel_futures=True)
        for server in (prefill, decode):
            server.wait_started()
        for agent in agents.all if has_agents else ():
            num_engines = shape.prefill.dp if agent in agents.all[::2] else shape.decode.dp
            ready = partial(knows_its_engines, agent, num_engines)
            wait_until(ready, f"the {agent.role} agent is ready")
        yield made


def knows_its_engines(agent: AgentProcess, num_engines: int) -> bool:
    return list(agent.status()["engines"].values()) == num_engines * [True]


OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "Spec",
        "spec_module_path": "tests.e2e.vllm.offloading",
        "cpu_bytes_to_use": 64 << 20,
    },
}
AS_SHIPPED: dict[str, Any] = {"engine_wait_s": 10.0}
"""Other tests do not wait for engines of an agent that was started again."""


def _prepare(agents: Agents, shape: Shape) -> None:
    """An agent of each side's own kind; with turns, then one of the other kind of each."""
    wanted = [(Role.PREFILL, shape.prefill.settings), (Role.DECODE, shape.decode.settings)]
    if not shape.turns:
        for role, settings in wanted:
            agents.prepare(role.value, **AS_SHIPPED, **settings)
        return
    ring, keys = KeyRing(agents.folder), signing_keys(agents.folder)
    for number, (role, settings) in enumerate([*wanted, (Role.DECODE, {}), (Role.PREFILL, {})]):
        ring.prepare(agents, role, f"{role.value}-{number}", **keys, **AS_SHIPPED, **settings)


def signing_keys(folder: Path) -> dict[str, list[str]]:
    """The setting of agents that sign their tickets."""
    key = folder / "ticket.key"
    key.touch(mode=0o600)
    key.write_bytes(base64.b64encode(secrets.token_bytes(32)))
    return {"ticket_keys": [str(key)]}


def server_of(beside: Sequence[AgentProcess], side: Side, shape: Shape, models: Path) -> VllmServer:
    """A server beside one agent, or one of each kind; they need not run yet."""
    module = "kvbus.integrations.vllm"
    endpoints = {one.role: f"{one.settings['runtime_dir']}/attach.sock" for one in beside}
    config = {
        "kv_role": "kv_both",
        "kv_load_failure_policy": shape.policy,
        "kv_connector": "NixlConnector" if shape.alias else "KvbusConnector",
        "kv_connector_module_path": f"{module}.nixl" if shape.alias else module,
        "kv_connector_extra_config": {
            "endpoint": endpoints if shape.turns else endpoints[beside[0].role],
            **shape.turns,
        },
    }
    if shape.multi:
        other = {"shared_storage_path": str(beside[0].folder / "example")}
        children = [
            {key: value for key, value in config.items() if key != "kv_load_failure_policy"},
            OFFLOADING,
            {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": other,
            },
        ]
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": shape.policy,
            "kv_connector_extra_config": {"connectors": children},
        }
    size = [] if side.block_size is None else ["--block-size", str(side.block_size)]
    flags = ["--tensor-parallel-size", str(side.tp), *size, *side.flags]
    flags += ["--data-parallel-size", str(side.dp)] if side.dp > 1 else []
    if side.drafts:
        drafts = {**side.drafts, "model": str(models / side.drafts["model"])}
        flags += ["--speculative-config", json.dumps(drafts)]
    flags += ["--kv-transfer-config", json.dumps(config)]
    folder = beside[0].folder / "vllm"
    flags = [one.replace("{models}", str(models)).replace("{folder}", str(folder)) for one in flags]
    return VllmServer(models / side.model, folder, side.cores, flags)
