"""A vLLM of both roles beside a cluster of SGLang, with the same model: what one prefills the other
decodes, by the router of `examples`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from kvbus.spawn import Child, free_port
from tests.e2e.sglang.clusters import (
    CHUNK_TOKENS,
    GIVES_UP_S,
    NUM_TOKENS,
    SETTLES_WITHIN_S,
    Cluster,
    num_completed,
)
from tests.e2e.sglang.servers import ANSWERS_WITHIN_S, ROOT, RefusedError
from tests.e2e.vllm import servers as vllm
from tests.e2e.vllm.servers import VllmServer
from tests.support.agents import wait_logged, wait_until

PYTHON = ROOT / ".venv-vllm/bin/python"
"""vLLM and SGLang ask for other versions of the same packages."""
MODEL = "model"
TO_VLLM, TO_SGLANG = "to-vllm", "to-sglang"
STARTS_WITHIN_S = 60.0
BLOCK = 32


@dataclass
class InAnotherVenv(VllmServer):
    """A vLLM that is started by a Python which has it."""

    def launch(self) -> None:
        self.folder.mkdir(exist_ok=True)
        command = [
            sys.executable,
            str(ROOT / "tests/e2e/vllm/guard.py"),
            str(PYTHON),
            "-m",
            vllm.ENTRY,
        ]
        command += ["--model", str(self.model), "--served-model-name", "model"]
        command += ["--port", str(self.port), *vllm.FLAGS, *self.flags]
        env = vllm.environment(self.cores)
        with self.log_path.open("ab") as log:
            self.guard = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env
            )


@dataclass
class Crossed:
    """The servers, and a router for each way."""

    pair: Cluster
    vllm: VllmServer
    routers: dict[str, int] = field(default_factory=dict)

    def handoff(self, way: str, prompt: Sequence[int], **fields: Any) -> list[int]:
        """The tokens that the router's client gets; raises `RefusedError`."""
        asked = {"prompt": list(prompt), "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
        connection = HTTPConnection("127.0.0.1", self.routers[way], timeout=ANSWERS_WITHIN_S)
        try:
            connection.request("POST", "/generate", json.dumps(asked))
            response = connection.getresponse()
            body = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            raise RefusedError(response.status, body)
        tokens: list[int] = json.loads(body)["tokens"]
        return tokens

    def completed(self) -> int:
        """How many handoffs the decode agent has logged."""
        return num_completed(self.pair.decode_agent)

    def alone(self, prompt: Sequence[int]) -> list[int]:
        """What vLLM says by itself."""
        return self.vllm.complete(prompt, NUM_TOKENS, cache_salt="alone").tokens

    def check(self) -> None:
        """Nothing is left of any request."""
        wait_until(self.vllm.has_no_block_in_use, "no block of vLLM in use", SETTLES_WITHIN_S)
        self.pair.check()


@contextmanager
def crossed(pair: Cluster, models: Path, folder: Path) -> Iterator[Crossed]:
    """All of it, started; each server has other blocks, and the prefill SGLang two ranks."""
    agents = {"prefill": pair.prefill_agent, "decode": pair.decode_agent}
    options = {
        "endpoint": {role: str(agent.attach) for role, agent in agents.items()},
        "model_id": MODEL,
        "fetch_timeout_s": float(GIVES_UP_S),
    }
    transfer = {
        "kv_connector": "KvbusConnector",
        "kv_connector_module_path": "kvbus.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
        "kv_load_failure_policy": "fail",
    }
    both = InAnotherVenv(
        models / "gqa",
        folder / "vllm",
        flags=(
            *("--block-size", str(BLOCK), "--max-num-batched-tokens", str(CHUNK_TOKENS)),
            *("--kv-transfer-config", json.dumps(transfer)),
        ),
    )
    made = Crossed(pair, both)
    routers: list[Child] = []
    ways = {TO_VLLM: (f"sglang={pair.prefill.url}", f"vllm={both.url}")}
    ways[TO_SGLANG] = f"vllm={both.url}", f"sglang={pair.decode.url}"
    with ExitStack() as stack:
        stack.callback(both.stop)
        both.launch()
        pair.wait_started()
        both.wait_started()
        for way, (first, second) in ways.items():
            port, log = free_port(), folder / f"{way}.log"
            command = [sys.executable, str(ROOT / "examples/cross_router.py"), "--port", str(port)]
            command += ["--prefill", first, "--decode", second]
            command += ["--bootstrap-port", str(pair.bootstrap_port)]
            routers.append(stack.enter_context(Child.start(way, command, log=log)))
            made.routers[way] = port
        for router in routers:
            wait_logged(router, "Uvicorn running", STARTS_WITHIN_S)
        yield made
