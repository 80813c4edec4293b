"""SGLang servers on CPUs, a pair for each transfer backend, and requests as a router sends them.

All times are of the system's clock, as those in SGLang's answers are.
"""

import contextlib
import http.client
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbus.bench.pairs import agent
from kvbus.spawn import free_port

from .client import TIMEOUT_S, Client, RequestFailed
from .processes import Group, group
from .servers import wait_ready

ROOT = Path(__file__).parents[2]
PLUGINS = (ROOT / "tests/e2e/sglang/stubs", Path(__file__).with_name("on_cpus"))
"""Stand-ins for packages that have no build for CPUs, and what the other backends need there."""
BACKENDS = {
    "kvbus": "kvbus.integrations.sglang, and two agents",
    "nixl": "SGLang's own over NIXL",
    "mooncake_tcp": "SGLang's own over Mooncake's TCP transport",
}
BASELINES = ("nixl", "mooncake_tcp")
ELEMENT_BYTES = 4
RESERVED_TOKENS = 32
"""Decode keeps so many free for each request."""
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--skip-tokenizer-init", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--enable-metrics", "--host", "127.0.0.1"),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What all servers of a run have in common."""

    model: Path
    folder: Path
    page_size: int
    prompt_tokens: int
    concurrency: int

    def flags(self) -> list[str]:
        """Of each server: memory for all requests at a time, and for one more."""
        longest = self.prompt_tokens + RESERVED_TOKENS
        return [
            *("--model-path", str(self.model), *FLAGS, "--page-size", str(self.page_size)),
            *("--context-length", str(longest), "--max-running-requests", str(self.concurrency)),
            *("--max-total-tokens", str((self.concurrency + 1) * longest)),
        ]


@dataclass(frozen=True, slots=True)
class Server:
    """One SGLang server."""

    group: Group
    port: int

    def wait_ready(self) -> None:
        """Return once it serves; a server that does not ends the benchmark."""
        wait_ready(self.group, Client(self.port, ""))

    def send(self, body: dict[str, Any]) -> http.client.HTTPConnection:
        """A request whose answer is still to be read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/generate", json.dumps(body), headers)
        return connection


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: seconds to the first token, and of these the handover's; all tokens."""

    first_token_s: float
    handover_s: float
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode server that hand over by one backend."""

    prefill: Server
    decode: Server
    bootstrap_port: int

    def request(self, prompt: str, num_tokens: int) -> Answer:
        """Send it to both servers at once, as SGLang's routers do, and read both answers."""
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {
            "input_ids": json.loads(prompt),
            "sampling_params": sampling,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": random.getrandbits(63),
        }
        sent_s = time.time()
        prefill = self.prefill.send(body)
        decode = self.decode.send(body | {"stream": True})
        first_token_s, tokens = _first_token_s(decode)
        with contextlib.closing(prefill):
            told = json.loads(_response(prefill).read())["meta_info"]
        prefilled_s = told["prefill_finished_time"]
        return Answer(first_token_s - sent_s, first_token_s - prefilled_s, tokens)

    def requests(self, prompts: Sequence[str], num_tokens: int, *, at_once: int) -> list[Answer]:
        """All of them, so many at a time."""
        with ThreadPoolExecutor(at_once) as threads:
            return [*threads.map(lambda prompt: self.request(prompt, num_tokens), prompts)]


@contextlib.contextmanager
def starting(recipe: Recipe, backend: str) -> Iterator[Pair]:
    """Start the servers of a backend, and its agents; they serve a while after."""
    port, roles = free_port(), ("prefill", "decode")
    flags = {
        "prefill": ["--disaggregation-bootstrap-port", str(port)],
        "decode": [
            *("--disaggregation-decode-retraction-backup", "none"),
            *("--num-reserved-decode-tokens", str(RESERVED_TOKENS)),
        ],
    }
    with contextlib.ExitStack() as stack:
        env: dict[str, dict[str, str]] = {role: {} for role in roles}
        if backend == "kvbus":
            for role in roles:
                started = stack.enter_context(agent(role, recipe.folder))
                env[role]["KVBUS_ATTACH"] = str(started.attach_path)
        for role in roles:
            flags[role] += ["--disaggregation-mode", role]
            flags[role] += ["--disaggregation-transfer-backend", backend]
        prefill, decode = (
            stack.enter_context(_server(recipe, f"{backend}-{role}", flags[role], env[role]))
            for role in roles
        )
        yield Pair(prefill, decode, port)


@contextlib.contextmanager
def _server(
    recipe: Recipe, name: str, flags: Sequence[str], env: dict[str, str]
) -> Iterator[Server]:
    """Start one, and end it."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port)]
    paths = [*map(str, PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**ENVIRONMENT, **env, "PYTHONPATH": os.pathsep.join(paths)}
    log = recipe.folder / f"{name}.log"
    with group(name, [*command, *recipe.flags(), *flags], log=log, env=env) as started:
        yield Server(started, port)


def _first_token_s(connection: http.client.HTTPConnection) -> tuple[float, list[int]]:
    """When the first piece of a streamed answer came, and all its tokens."""
    with contextlib.closing(connection):
        response, first_s, piece = _response(connection), 0.0, {}
        while line := response.readline():
            if line.startswith(b"data: {"):
                first_s = first_s or time.time()
                piece = json.loads(line.removeprefix(b"data: "))
    if "output_ids" not in piece:
        raise RequestFailed(f"a stream ended with {piece}")
    return first_s, piece["output_ids"]


def _response(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    response = connection.getresponse()
    if response.status != 200:
        raise RequestFailed(f"status {response.status}: {response.read().decode()[:500]}")
    return response
