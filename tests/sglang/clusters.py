"""Clusters: a prefill and a decode SGLang, the agents beside them, and a router's part.

A start takes half a minute of all cores: tests of one cluster are one module, which starts it once,
and ends it.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from kvbus.spawn import free_port
from tests.agents import AgentProcess, Agents, agents_ended, wait_until
from tests.sglang.servers import Call, SglangServer
from tests.vllm.models import VOCABULARY

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
    flags: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """Both sides."""

    prefill: Side
    decode: Side
    model: str = "gqa"


RADIX = ("--disaggregation-decode-enable-radix-cache",)
CLUSTERS: Mapping[str, Shape] = {
    # Small pages to large ones, prompts cut into chunks and cached on both sides, memory mapped.
    "pages": Shape(Side(16), Side(64, flags=RADIX, settings={"mapped": True})),
    # Small pages to large ones, and layers with a window, for a model that has such layers.
    "windows": Shape(Side(16), Side(64, flags=RADIX), model="mellum"),
    # Two ranks to one, pages of one token to some, by NIXL.
    "ranks": Shape(Side(1, tp=2), Side(16)),
    "stages": Shape(Side(1, pp=2), Side(16)),
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

    def is_idle(self) -> bool:
        """By SGLang's own counters."""
        return idle(self.prefill, self.decode)

    def check(self) -> None:
        """Nothing is left of any request."""
        wait_until(self.is_idle, "idle servers", SETTLES_WITHIN_S)
        self.agents.check()

    def stop(self) -> None:
        for server in (self.prefill, self.decode):
            server.stop()
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
    tp: int = 1,
    pp: int = 1,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> SglangServer:
    """A server of one role, beside the agent at ``attach``; it is not started."""
    return SglangServer(
        model,
        folder,
        (
            *("--page-size", str(page), "--tp-size", str(tp), "--pp-size", str(pp)),
            *("--disaggregation-mode", role),
            *("--disaggregation-transfer-backend", "kvbus", *flags),
        ),
        {
            "KVBUS_ATTACH": attach,
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join([*map(str, range(tp))] * pp),
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(GIVES_UP_S),
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(GIVES_UP_S),
            **(env or {}),
        },
    )


@contextmanager
def cluster(
    shape: Shape, models: Path, folder: Path, *, has_agents: bool = True
) -> Iterator[Cluster]:
    """Servers that serve, with agents that run, or only have their places."""
    port = free_port()
    with agents_ended(Agents) as agents:
        sides = {"prefill": shape.prefill, "decode": shape.decode}
        for role, side in sides.items():
            agents.prepare(role, **side.settings)
        if has_agents:
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
                flags=(*modes[role], *side.flags),
            )
            for (role, side), agent in zip(sides.items(), agents.all, strict=True)
        ]
        prefill, decode = servers
        made = Cluster(agents, prefill, decode, port)
        try:
            for server in servers:
                server.launch()
            for server in servers:
                server.wait_started()
            yield made
        finally:
            made.stop()


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Tokens of the models' vocabulary, without the special ones."""
    drawn = random.Random(seed)
    return [drawn.randrange(3, VOCABULARY) for _ in range(num_tokens)]
