"""A prefill agent, a decode agent and a vLLM server beside each, and a router's part between them.

Refuses to look inside: what a server did is read from its answers, its metrics and its log.
"""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.agents import AgentProcess, Agents, agents_ended, wait_until
from tests.vllm.calls import Call, Completion
from tests.vllm.models import VOCABULARY
from tests.vllm.servers import VllmServer
from tests.vllm.wirings import Wire

FOR_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What routers for vLLM's own connector send with a prefill request, empty fields included."""

NUM_TOKENS = 12
SETTLES_WITHIN_S = 60.0
_SALTS = count()


@dataclass
class Engine:
    """How one of the two servers is started, apart from its wiring."""

    tp: int = 1
    cores: str = "0"
    block_size: int | None = None
    flags: Sequence[str] = ()

    def all_flags(self) -> list[str]:
        """The flags of its command line."""
        size = [] if self.block_size is None else ["--block-size", str(self.block_size)]
        return ["--tensor-parallel-size", str(self.tp), *size, *self.flags]


@dataclass
class Cluster:
    """Both sides of a deployment, and requests through them."""

    agents: Agents
    prefill: VllmServer
    decode: VllmServer
    calls: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=32))

    @property
    def prefill_agent(self) -> AgentProcess:
        return self.agents.all[0]

    @property
    def decode_agent(self) -> AgentProcess:
        return self.agents.all[1]

    def ticket(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """Have ``prompt`` prefilled; the ``kv_transfer_params`` of the answer."""
        prefilled = self.prefill.complete(prompt, 1, kv_transfer_params=FOR_DECODE, **fields)
        assert prefilled.params is not None, "the prefill answered without kv_transfer_params"
        return prefilled.params

    def begin(
        self, prompt: Sequence[int], ticket: object, num_tokens: int = NUM_TOKENS, **fields: Any
    ) -> Call:
        """Send the decode request of a ticket."""
        return self.decode.begin(prompt, num_tokens, kv_transfer_params=ticket, **fields)

    def redeem(
        self, prompt: Sequence[int], ticket: object, num_tokens: int = NUM_TOKENS, **fields: Any
    ) -> Completion:
        """`begin`, and its answer."""
        return self.begin(prompt, ticket, num_tokens, **fields).completion()

    def handoff(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        """The tokens that decode says after prefill has read ``prompt``."""
        return self.redeem(prompt, self.ticket(prompt), num_tokens).tokens

    def alone(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        """The tokens that decode says after reading ``prompt`` itself, whatever it has cached."""
        salt = f"alone-{next(_SALTS)}"
        return self.decode.complete(prompt, num_tokens, cache_salt=salt).tokens

    def soon(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> Future[list[int]]:
        """A `handoff` beside others."""
        return self.calls.submit(self.handoff, prompt, num_tokens)

    def check(self) -> None:
        """Nothing is left: no block in either server, no offer, lease or fetch in an agent."""
        for server in (self.prefill, self.decode):
            what = f"no block in use: {server.log_path}"
            wait_until(lambda server=server: server.blocks_in_use() == 0, what, SETTLES_WITHIN_S)
        self.agents.check()

    def stop(self) -> None:
        """End both servers."""
        self.calls.shutdown(cancel_futures=True)
        self.prefill.stop()
        self.decode.stop()


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """A random prompt; two seeds give prompts that share no prefix."""
    chosen = random.Random(seed)
    return [chosen.randrange(3, VOCABULARY) for _ in range(num_tokens)]


@contextmanager
def cluster(
    model: Path,
    wire: Wire,
    *,
    prefill: Engine | None = None,
    decode: Engine | None = None,
    decode_model: Path | None = None,
    policy: str = "recompute",
    agents_first: bool = True,
    **settings: Any,
) -> Iterator[Cluster]:
    """Start both sides side by side and end them; ``settings`` are those of the decode agent."""
    with agents_ended(Agents) as agents:
        sides = (agents.prepare("prefill"), agents.prepare("decode", **settings))
        if agents_first:
            agents.start(*sides)
        plans = (prefill or Engine(cores="0"), decode or Engine(cores="1"))
        models = (model, decode_model or model)
        made = Cluster(
            agents,
            *(
                _server(agents.folder / f"vllm-{agent.role}", model, plan, wire(agent), policy)
                for agent, model, plan in zip(sides, models, plans, strict=True)
            ),
        )
        try:
            made.prefill.launch()
            made.decode.launch()
            made.prefill.wait_started()
            made.decode.wait_started()
            yield made
        finally:
            made.stop()


def _server(folder: Path, model: Path, plan: Engine, wiring: Any, policy: str) -> VllmServer:
    flags = [*plan.all_flags(), *wiring.flags(policy)]
    return VllmServer(model, folder, cores=plan.cores, flags=flags, env=wiring.env)
