"""A prefill agent, a decode agent and a vLLM server beside each, and a router's part between them.

Refuses to look inside: what a server did is read from its answers, its metrics and its log.
"""

import base64
import random
import secrets
import signal
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from kvbus.keys import Role
from kvbus.protocol import Rendezvous
from tests.agents import AgentProcess, Agents, agents_ended, wait_until
from tests.keyring import KeyRing
from tests.vllm.calls import Call, Completion
from tests.vllm.models import VOCABULARY
from tests.vllm.servers import VllmServer
from tests.vllm.shapes import Shape, Side
from tests.vllm.wirings import Wire, Wiring, by_kvbus_both_ways, tokens_from_elsewhere

FOR_DECODE: Mapping[str, Any] = {
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
class Cluster:
    """Both sides of a deployment, and requests through them."""

    agents: Agents
    wire: Wire
    prefill: VllmServer
    decode: VllmServer
    repeats_itself: bool = True
    """Whether decode says the same when it finds the beginning of a prompt in its cache."""
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=32))
    _said: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @property
    def prefill_agent(self) -> AgentProcess:
        return self.agents.all[0]

    @property
    def decode_agent(self) -> AgentProcess:
        return self.agents.all[1]

    @property
    def agent_of_answers(self) -> AgentProcess:
        """With turns, the prefill agent beside decode: it has what decode offers."""
        return self.agents.all[3]

    def ticket(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Have ``prompt`` prefilled; the ``kv_transfer_params`` of the answer."""
        params = self.prefill_answer(prompt).params
        assert params is not None, "the prefill answered without kv_transfer_params"
        return params

    def prefill_answer(self, prompt: Sequence[int]) -> Completion:
        """What the prefill side answers when it is asked to read for decode."""
        return self.prefill.complete(prompt, 1, kv_transfer_params=FOR_DECODE)

    def begin(self, prompt: Sequence[int], ticket: object, **fields: Any) -> Call:
        """Send the decode request of a ticket."""
        return self.decode.begin(prompt, NUM_TOKENS, kv_transfer_params=ticket, **fields)

    def redeem(self, prompt: Sequence[int], ticket: object, **fields: Any) -> list[int]:
        """`begin`, and the tokens of its answer."""
        return self.begin(prompt, ticket, **fields).completion().tokens

    def stuck(self, prompt: Sequence[int]) -> Call:
        """A decode request whose fetch waits for the prefill agent, which is stopped."""
        ticket = self.ticket(prompt)
        self.prefill_agent.signal(signal.SIGSTOP)
        call = self.begin(prompt, ticket)
        wait_until(self.under_way, "the fetch has begun")
        return call

    def handoff(self, prompt: Sequence[int], **fields: Any) -> list[int]:
        """The tokens that decode says after prefill has read ``prompt``."""
        return self.redeem(prompt, self.ticket(prompt), **fields)

    def meeting(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The ``kv_transfer_params`` for decode and for prefill of a request that both get."""
        meets = Rendezvous(uuid.uuid4().hex, self.prefill_agent.peer, request_id="met").to_json()
        to_decode = {"do_remote_prefill": True, "do_remote_decode": False, "rendezvous": meets}
        return to_decode, {**FOR_DECODE, "transfer_id": meets["transfer_id"]}

    def meet(self, prompt: Sequence[int], **fields: Any) -> tuple[Call, Call]:
        """Send both servers a prompt at the same time; the decode side's request, and prefill's."""
        to_decode, to_prefill = self.meeting()
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

    def soon(self, prompt: Sequence[int]) -> Future[list[int]]:
        """A `handoff` beside others."""
        return self.threads.submit(self.handoff, prompt)

    def soon_if_offered(self, prompt: Sequence[int]) -> Future[list[int]]:
        """As `soon`, while there may be no agent to offer it."""
        return self.threads.submit(lambda: self.redeem(prompt, self.prefill_answer(prompt).params))

    def moved(self) -> float:
        """A count that grows with each handoff whose KV came from the prefill side."""
        return self.wire.moved(self.decode_agent, self.decode)

    def fetched_tokens(self) -> float:
        """Tokens that decode counts as computed elsewhere."""
        return tokens_from_elsewhere(self.decode_agent, self.decode)

    def under_way(self) -> int:
        """How many fetches the decode agent has."""
        return int(self.decode_agent.status()["counts"]["fetches"])

    def reading(self) -> float:
        """How many prompts the prefill side has begun."""
        return self.wire.reading(self.prefill_agent, self.prefill)

    @property
    def whole(self) -> bool:
        """Whether all of it runs."""
        return all(part.alive for part in (*self.agents.all, self.prefill, self.decode))

    def check(self) -> None:
        """Nothing is left: no block in either server, no offer, lease or fetch in an agent.

        And what was loaded has left nothing wrong in decode's cache: each prompt is asked again.
        """
        said, self._said = self._said, {}
        for prompt, tokens in said.items() if self.repeats_itself else ():
            assert self.again(prompt) == tokens
        for server in (self.prefill, self.decode):
            what = f"no block in use: {server.log_path}"
            wait_until(lambda server=server: server.blocks_in_use() == 0, what, SETTLES_WITHIN_S)
        self.agents.check()

    def stop(self) -> None:
        """End both servers."""
        self.threads.shutdown(cancel_futures=True)
        self.prefill.stop()
        self.decode.stop()


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """A random prompt; those of two seeds share no prefix that a server could cache."""
    chosen = random.Random(seed)
    return [chosen.randrange(3, VOCABULARY) for _ in range(num_tokens)]


def offers_again(pair: Cluster, seed: int) -> None:
    """Return once prefill offers, each time to a decode side that answers without.

    Prompts are of ``seed`` and what follows it.
    """
    seeds = count(seed)

    def offers() -> bool:
        prompt = prompt_of(100, seed=next(seeds))
        params = pair.prefill_answer(prompt).params
        assert pair.redeem(prompt, params) == pair.alone(prompt)
        return params is not None

    wait_until(offers, "an offer", SETTLES_WITHIN_S)


def works_again(pair: Cluster, seed: int) -> None:
    """Return once a handoff moves KV; its tokens are right all the while.

    Prompts are of ``seed`` and what follows it.
    """
    seeds = count(seed)

    def moves() -> bool:
        prompt, before = prompt_of(100, seed=next(seeds)), pair.moved()
        params = pair.prefill_answer(prompt).params
        assert pair.redeem(prompt, params) == pair.alone(prompt)
        return pair.moved() > before

    wait_until(moves, "a handoff that moves KV", SETTLES_WITHIN_S)


@contextmanager
def cluster(
    shape: Shape, models: Path, wire: Wire, *, has_agents: bool = True
) -> Iterator[Cluster]:
    """Start both sides side by side, and end them; without ``has_agents`` only the servers."""
    with agents_ended(Agents) as agents:
        every = _agents_of(shape, agents)
        sides, others = every[:2], every[2:]
        for each in every:
            each.runs_first = True  # vLLM's workers spin while they wait, on all cores
        if has_agents:
            agents.start(*every)
        wirings = [wire.wiring(agent, shape.alias) for agent in sides]
        if shape.turns is not None:
            pairs = zip(sides, others, strict=True)
            wirings = [by_kvbus_both_ways(*pair, shape.turns) for pair in pairs]
        plans = zip(sides, (shape.prefill, shape.decode), wirings, strict=True)
        servers = [_server(agent, side, shape, models, each) for agent, side, each in plans]
        made = Cluster(agents, wire, *servers, repeats_itself=shape.decode.model != "mla")
        try:
            for server in servers:
                server.launch()
            for server in servers:
                server.wait_started()
            if has_agents:
                for side in every:
                    wait_until(lambda side=side: wire.ready(side), f"{side.role} is ready")
            yield made
        finally:
            made.stop()


def _agents_of(shape: Shape, agents: Agents) -> list[AgentProcess]:
    """An agent of each side's own kind; with turns, then one of the other kind of each."""
    wanted = [(Role.PREFILL, shape.prefill.settings), (Role.DECODE, shape.decode.settings)]
    if shape.turns is not None:
        wanted += [(Role.DECODE, {}), (Role.PREFILL, {})]
    if not shape.keys:
        return [agents.prepare(role.value, **dict(more)) for role, more in wanted]
    ring, signing = KeyRing(agents.folder), agents.folder / "ticket.key"
    signing.touch(mode=0o600)
    signing.write_bytes(base64.b64encode(secrets.token_bytes(32)))
    return [
        ring.prepare(
            agents, role, f"{role.value}-{number}", ticket_keys=[str(signing)], **dict(more)
        )
        for number, (role, more) in enumerate(wanted)
    ]


def _server(
    agent: AgentProcess, side: Side, shape: Shape, models: Path, wiring: Wiring
) -> VllmServer:
    flags = (*side.all_flags(), *wiring.flags(shape.policy))
    folder = agent.folder / "vllm"
    return VllmServer(models / side.model, folder, cores=side.cores, flags=flags, env=wiring.env)
