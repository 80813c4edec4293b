"""Measures vLLM's prefill server while the requests queue at a smaller decode server.

Prefill has room for ``--prefill-room`` prompts, decode for ``--decode-room``, and all requests come
at once. A round sends them to prefill alone, and then to both. Run it from the repository's root,
in an environment that has vLLM (its CPU build will do): ``python benchmarks/vllm_queued.py``.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from handover.client import Prefilled, RequestFailed
from handover.model import ModelShape, Prompts, write_model
from handover.pairs import DECODE_CORE, PREFILL_CORE
from handover.servers import Recipe, Server, starting, wait_ready

from kvbus.bench.pairs import BenchAgent, agent

BLOCK, SPARE_BLOCKS = 32, 2
PARKED_WITHIN_S = 2.0
"""Later, also the offers of an engine that lacks no block are parked: ``park_after_s`` is 1 s."""
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "as it was": {"prefill": {"max_hold_s": 0.1}},
    "hold": {},
    "hold and park": {"prefill": {"park_bytes": 8 << 30}},
}
"""Settings of the agents. Without a hold, an offer ends after its time to live."""


@dataclass
class Round:
    """Seconds until prefill has answered all; ends of the decode requests."""

    alone_s: float = 0.0
    prefill_s: float = 0.0
    whole_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def ratio(self) -> float:
        return self.prefill_s / self.alone_s


@dataclass(frozen=True)
class Pair:
    prefill: Server
    decode: Server
    agents: Sequence[BenchAgent]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--prefill-room", type=int, default=4, help="prompts in its cache")
    parser.add_argument("--decode-room", type=int, default=2, help="requests in its cache")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt")
    parser.add_argument("--decode-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8, help="KV heads of 128, in bf16")
    parser.add_argument("--ttl", type=float, default=5.0, help="offer_ttl_s of the prefill vLLM")
    parser.add_argument("--kill", action="store_true", help="kill prefill when it has answered all")
    return parser.parse_args()


@contextlib.contextmanager
def running_first() -> Iterator[None]:
    """What starts meanwhile runs before workers, which spin; deploy/systemd does it, too."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@contextlib.contextmanager
def pair(options: argparse.Namespace, recipe: Recipe, settings: Any) -> Iterator[Pair]:
    whole = -(-(options.tokens + options.decode_tokens) // BLOCK)
    rooms = {"prefill": options.prefill_room, "decode": options.decode_room}
    with contextlib.ExitStack() as stack:
        with running_first():
            agents = [
                stack.enter_context(agent(role, recipe.folder, settings=settings.get(role, {})))
                for role in rooms
            ]
        servers = []
        for beside, (role, room), core in zip(
            agents, rooms.items(), (PREFILL_CORE, DECODE_CORE), strict=True
        ):
            flags = ("--num-gpu-blocks-override", str(room * whole + SPARE_BLOCKS))
            flags += ("--block-size", str(BLOCK), "--no-enable-prefix-caching")
            own = Recipe(recipe.model, recipe.folder, 1, recipe.max_tokens, flags)
            extra = {"endpoint": str(beside.attach_path)}
            extra |= {"offer_ttl_s": options.ttl} if role == "prefill" else {}
            config = json.dumps(
                {
                    "kv_connector": "KvbusConnector",
                    "kv_connector_module_path": "kvbus.integrations.vllm",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": extra,
                }
            )
            servers.append(
                stack.enter_context(starting(own, role, core=core, kv_transfer_config=config))
            )
        for server in servers:
            wait_ready(server.group, server.client())
        yield Pair(servers[0], servers[1], agents)


def prefilled(server: Server, prompt: str, *, offer: bool) -> Prefilled:
    with contextlib.closing(server.client()) as client:
        return client.prefill(prompt, offer=offer)


def decoded(server: Server, prompt: str, num_tokens: int, params: Any) -> list[int]:
    with contextlib.closing(server.client()) as client:
        streamed = client.stream(prompt, num_tokens, params=params, with_tokens=True)
    return streamed.all_tokens


def measure(
    options: argparse.Namespace, pair: Pair, prompts: Sequence[str], *, kill: bool = False
) -> Round:
    """Send all, first to prefill alone; each decode request follows its ticket."""
    one, num_tokens = Round(), options.decode_tokens
    with ThreadPoolExecutor(2 * len(prompts)) as threads:
        start_s = time.perf_counter()
        list(threads.map(partial(prefilled, pair.prefill, offer=False), prompts))
        one.alone_s = time.perf_counter() - start_s

        answers: list[Future[list[int]]] = []

        def serve(prompt: str) -> float:
            done = prefilled(pair.prefill, prompt, offer=True)
            params = done.kv_transfer_params
            answers.append(threads.submit(decoded, pair.decode, prompt, num_tokens, params))
            return done.received_s

        start_s = time.perf_counter()
        one.prefill_s = max(threads.map(serve, prompts)) - start_s
        if kill:
            time.sleep(PARKED_WITHIN_S)
            os.killpg(pair.prefill.group.process.pid, signal.SIGKILL)
        for answer in answers:
            try:
                one.ends["answered" if len(answer.result()) == num_tokens else "short"] += 1
            except RequestFailed as error:
                one.ends[str(error)[:60]] += 1
        one.whole_s = time.perf_counter() - start_s
    return one


def expired(pair: Pair) -> Counter[str]:
    """Failed handoffs so far, by their code."""
    lines = (json.loads(line) for line in pair.agents[1].child.log_text().splitlines())
    return Counter(line["code"] for line in lines if line["event"] == "handoff.failed")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended by a signal"))
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="kvq-") as name:
        folder, shape = Path(name), ModelShape(options.layers, options.heads)
        max_tokens = options.tokens + options.decode_tokens + BLOCK
        write_model(folder / "model", shape, max_tokens=max_tokens)
        print(f"{shape.token_bytes * options.tokens / 1e6:.1f} MB a prompt")
        recipe = Recipe(folder / "model", folder, 1, max_tokens)
        for variant in options.variant or VARIANTS:
            with pair(options, recipe, VARIANTS[variant]) as servers:
                rounds, before = [], Counter[str]()
                drawn = Prompts(0)
                measure(options, servers, drawn.several(2, options.tokens))  # warms up
                for _ in range(1 if options.kill else options.rounds):
                    prompts = drawn.several(options.requests, options.tokens)
                    rounds.append(measure(options, servers, prompts, kill=options.kill))
                    failed = expired(servers)
                    print(variant, rounds[-1], "failed:", dict(failed - before), flush=True)
                    before = failed
                median = statistics.median(one.ratio for one in rounds)
                print(f"{variant}: prefill takes {median:.2f} of its time alone", flush=True)


if __name__ == "__main__":
    main()
