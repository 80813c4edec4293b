"""An SGLang of each role and one vLLM of both, with the same model: what one prefills the other
decodes, by the router of `examples`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from kvbus.spawn import Child, free_port
from tests.agents import AgentProcess, Agents, agents_ended, wait_logged, wait_until
from tests.sglang.clusters import (
    CHUNK_TOKENS,
    GIVES_UP_S,
    NUM_TOKENS,
    SETTLES_WITHIN_S,
    idle,
    num_completed,
    sglang_of,
)
from tests.sglang.servers import ANSWERS_WITHIN_S, ROOT, RefusedError, SglangServer
from tests.vllm import servers as vllm
from tests.vllm.servers import VllmServer

PYTHON = ROOT / ".venv-vllm/bin/python"
"""vLLM and SGLang ask for other versions of the same packages."""
MODEL = "model"
TO_VLLM, TO_SGLANG = "to-vllm", "to-sglang"
STARTS_WITHIN_S = 60.0
BLOCK, PAGE_AT_PREFILL, PAGE_AT_DECODE = 64, 16, 32


@dataclass
class InAnotherVenv(VllmServer):
    """A vLLM that is started by a Python which has it."""

    def launch(self) -> None:
        self.folder.mkdir(exist_ok=True)
        command = [sys.executable, str(ROOT / "tests/vllm/guard.py"), str(PYTHON), "-m", vllm.ENTRY]
        command += ["--model", str(self.model), "--served-model-name", "model"]
        command += ["--port", str(self.port), *vllm.FLAGS, *self.flags]
        env = vllm.environment(self.cores)
        with self.log_path.open("ab") as log:
            self.guard = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env
            )


@dataclass
class Crossed:
    """The servers, their agents, and a router for each way."""

    agents: Agents
    prefill: SglangServer
    decode: SglangServer
    vllm: VllmServer
    routers: dict[str, int] = field(default_factory=dict)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=16))

    @property
    def decode_agent(self) -> AgentProcess:
        return self.agents.all[1]

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
        return num_completed(self.decode_agent)

    def alone(self, prompt: Sequence[int]) -> list[int]:
        """What vLLM says by itself."""
        return self.vllm.complete(prompt, NUM_TOKENS, cache_salt="alone").tokens

    def check(self) -> None:
        """Nothing is left of any request."""
        wait_until(lambda: idle(self.prefill, self.decode), "idle SGLang", SETTLES_WITHIN_S)
        wait_until(self.vllm.has_no_block_in_use, "no block of vLLM in use", SETTLES_WITHIN_S)
        self.agents.check()


@contextmanager
def crossed(models: Path, folder: Path) -> Iterator[Crossed]:
    """All of it, started; each server has other blocks, and the prefill SGLang two ranks."""
    bootstrap_port = free_port()
    with agents_ended(Agents) as agents, ExitStack() as stack:
        agents.prepare("prefill"), agents.prepare("decode")
        agents.start(*agents.all)
        sockets = [f"{agent.settings['runtime_dir']}/attach.sock" for agent in agents.all]
        named = {"KVBUS_MODEL": MODEL}
        prefill = sglang_of(
            models / "gqa",
            folder / "prefill",
            role="prefill",
            attach=sockets[0],
            page=PAGE_AT_PREFILL,
            tp=2,
            flags=(
                *("--disaggregation-bootstrap-port", str(bootstrap_port)),
                *("--chunked-prefill-size", str(CHUNK_TOKENS)),
            ),
            env=named,
        )
        decode = sglang_of(
            models / "gqa",
            folder / "decode",
            role="decode",
            attach=sockets[1],
            page=PAGE_AT_DECODE,
            flags=(
                *("--disaggregation-decode-retraction-backup", "none"),
                "--disaggregation-decode-enable-radix-cache",
            ),
            env=named,
        )
        options = {
            "endpoint": dict(zip(("prefill", "decode"), sockets, strict=True)),
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
        made = Crossed(agents, prefill, decode, both)
        for server in (prefill, decode, both):
            stack.callback(server.stop)
            server.launch()
        stack.callback(made.threads.shutdown)
        for server in (prefill, decode, both):
            server.wait_started()
        ways = {TO_VLLM: (f"sglang={prefill.url}", f"vllm={both.url}")}
        ways[TO_SGLANG] = f"vllm={both.url}", f"sglang={decode.url}"
        for way, (first, second) in ways.items():
            port, log = free_port(), folder / f"{way}.log"
            command = [sys.executable, str(ROOT / "examples/cross_router.py"), "--port", str(port)]
            command += ["--prefill", first, "--decode", second]
            command += ["--bootstrap-port", str(bootstrap_port)]
            child = stack.enter_context(Child.start(way, command, log=log))
            wait_logged(child, "Uvicorn running", STARTS_WITHIN_S)
            made.routers[way] = port
        yield made
