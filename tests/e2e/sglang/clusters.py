"""Clusters: a prefill and a decode SGLang, the agents beside them with keys, and a router's part.

A start takes half a minute of all cores, and so tests share clusters: there are few, and modules of
one cluster follow each other.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from kvbus.protocol import Role
from kvbus.spawn import free_port
from tests.e2e.sglang.servers import Call, RefusedError, SglangServer
from tests.e2e.vllm.models import VOCABULARY
from tests.support.agents import AgentProcess, Agents, agents_ended, wait_until
from tests.support.keyring import KeyRing

NUM_TOKENS = 12
CHUNK_TOKENS = 256
SETTLES_WITHIN_S = 60.0
GIVES_UP_S = 20
COUNTED = (
    *("num_used_tokens", "num_running_reqs", "num_queue_reqs"),
    *("num_prefill_inflight_queue_reqs", "num_decode_transfer_queue_reqs"),
)
"""What SGLang counts of requests and of its pools, and is 0 when nothing goes on."""


@dataclass(frozen=True)
class Side:
    """One server, and the settings of its agent."""

    page: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """Both sides; their agents start first, unless it is told otherwise."""

    prefill: Side
    decode: Side
    model: str = "gqa"
    agents_first: bool = True


NAMED = {"KVBUS_MODEL": "model"}
RADIX = ("--disaggregation-decode-enable-radix-cache",)
CLUSTERS: Mapping[str, Shape] = {
    # Two ranks to one, small pages to large ones, prompts in chunks and cached on both sides.
    "ranks": Shape(Side(16, tp=2, env=NAMED), Side(64, flags=RADIX)),
    # Pages of one token to larger ones, and layers with a window, for a model that has such layers.
    "windows": Shape(Side(1), Side(16, flags=RADIX), model="mellum", agents_first=False),
    "stages": Shape(Side(1, pp=2), Side(16)),
    "replicas": Shape(Side(16, dp=2), Side(64, dp=2)),
}


@dataclass
class Cluster:
    """Both sides of a deployment, and requests through them."""

    agents: Agents
    prefill: SglangServer
    decode: SglangServer
    bootstrap_port: int
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=32))
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def prefill_agent(self) -> AgentProcess:
        return self.agents.all[0]

    @property
    def decode_agent(self) -> AgentProcess:
        return self.agents.all[1]

    def room(self) -> dict[str, Any]:
        """What a router adds to a request for both servers."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": self._random.getrandbits(63),
        }

    def begin(self, prompt: Sequence[int], **room: Any) -> tuple[Call, Call]:
        """Send a request to prefill and to decode, as routers do."""
        both = room or self.room()
        prefill = self.prefill.begin(prompt, NUM_TOKENS, **both)
        return prefill, self.decode.begin(prompt, NUM_TOKENS, **both)

    def handoff(self, prompt: Sequence[int]) -> list[int]:
        """What decode says; raises `RefusedError`."""
        prefill, decode = self.begin(prompt)
        try:
            tokens = decode.tokens()
            assert prefill.tokens()[:1] == tokens[:1]
        finally:
            prefill.abort()
        return tokens

    def wait_started(self) -> None:
        """Return once requests are served."""
        self.prefill.wait_started()
        self.decode.wait_started()
        if not self.decode_agent.alive:
            self.agents.start(*self.agents.all)
        wait_until(self.hands_off, "a handoff", SETTLES_WITHIN_S)

    def hands_off(self) -> bool:
        """Whether a request is served now, as it is not while an agent is away."""
        try:
            self.handoff(prompt_of(20, self._random.getrandbits(32)))
        except RefusedError:
            return False
        return True

    def restart(self, agent: AgentProcess, **settings: Any) -> None:
        """Another agent in its place, once requests are served again."""
        agent.kill()
        agent.settings.update(settings)
        agent.start()
        wait_until(self.hands_off, "a handoff", SETTLES_WITHIN_S)

    def is_idle(self) -> bool:
        """By SGLang's own counters."""
        return idle(self.prefill, self.decode)

    def check(self) -> None:
        """Nothing is left of any request."""
        wait_until(self.is_idle, "idle servers", SETTLES_WITHIN_S)
        self.agents.check()

    def stop(self) -> None:
        """End the servers side by side: each takes some seconds."""
        list(self.threads.map(SglangServer.stop, (self.prefill, self.decode)))
        self.threads.shutdown()


def num_completed(agent: AgentProcess) -> int:
    """How many handoffs a decode agent has logged by now."""
    return sum(line["event"] == "handoff.completed" for line in agent.log())


def log_probabilities(answer: Mapping[str, Any]) -> tuple[list[float], list[int]]:
    """Of an answer with ``top_logprobs_num``: those of its tokens and of their alternatives."""
    told = answer["meta_info"]
    entries = [*told["output_token_logprobs"], *chain(*told["output_top_logprobs"])]
    return [value for value, *_ in entries], [token for _, token, *_ in entries]


def idle(*servers: SglangServer) -> bool:
    """Whether they hold nothing, by SGLang's own counters."""
    return not any(server.metric(name) for server in servers for name in COUNTED)


def sglang_of(
    model: Path,
    folder: Path,
    *,
    role: str,
    attach: str,
    page: int,
    tp: int,
    pp: int,
    flags: Sequence[str],
    env: Mapping[str, str],
    dp: int = 1,
) -> SglangServer:
    """A server of one role, beside the agent at ``attach``; it is not started."""
    return SglangServer(
        model,
        folder,
        (
            *("--page-size", str(page), "--tp-size", str(tp), "--pp-size", str(pp)),
            *("--dp-size", str(dp)),
            *("--disaggregation-mode", role),
            *("--disaggregation-transfer-backend", "kvbus", *flags),
        ),
        {
            "KVBUS_ATTACH": attach,
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join([*map(str, range(tp * dp))] * pp),
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(GIVES_UP_S),
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(GIVES_UP_S),
            **env,
        },
    )


@contextmanager
def cluster(shape: Shape, models: Path, folder: Path) -> Iterator[Cluster]:
    """Servers that were launched, with agents, or their places; `Cluster.wait_started` follows."""
    port = free_port()
    with agents_ended(Agents) as agents:
        sides = {"prefill": shape.prefill, "decode": shape.decode}
        ring = KeyRing(agents.folder)
        for role in sides:
            ring.prepare(agents, Role(role), f"{role}-0")
        if shape.agents_first:
            agents.start(*agents.all)
        modes = {
            "prefill": (
                *("--disaggregation-bootstrap-port", str(port)),
                *("--chunked-prefill-size", str(CHUNK_TOKENS)),
            ),
            "decode": ("--disaggregation-decode-retraction-backup", "none"),
        }
        servers = [
            sglang_of(
                models / shape.model,
                folder / role,
                role=role,
                attach=f"{agent.settings['runtime_dir']}/attach.sock",
                page=side.page,
                tp=side.tp,
                pp=side.pp,
                dp=side.dp,
                flags=(*modes[role], *side.flags),
                env=side.env,
            )
            for (role, side), agent in zip(sides.items(), agents.all, strict=True)
        ]
        prefill, decode = servers
        made = Cluster(agents, prefill, decode, port)
        try:
            for server in servers:
                server.launch()
            yield made
        finally:
            made.stop()


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Tokens of the models' vocabulary, without the special ones."""
    drawn = random.Random(seed)
    return [drawn.randrange(3, VOCABULARY) for _ in range(num_tokens)]
