"""vLLM servers as real processes, seen as their users see them: HTTP, metrics, log, processes.

Refuses to import vLLM, which takes seconds and warns: whatever a test wants to know, a server says.
"""

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvbus.spawn import free_port
from tests.e2e.vllm.calls import ANSWERS_WITHIN_S, Call, Completion, ask
from tests.support.agents import wait_until
from tests.support.forked import Forked

STARTS_WITHIN_S = 300.0
ENDS_WITHIN_S = 30.0
KV_BYTES = 128 << 20
TAIL_CHARS = 6000
TROUBLE = re.compile("(WARNING|ERROR).*kvbus", re.IGNORECASE)
ENTRY = "vllm.entrypoints.launchers.api_server.entry"
NETWORK = "TESTS_NETWORK_NAMESPACE"
"""Variable that names the network namespace of a server; without it, that of the test."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_SERVER_DEV_MODE": "1",  # a test may drop the prefix cache
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "TORCHDYNAMO_DISABLE": "1",  # a part of the sampler, compiled anew by each worker
    "OMP_NUM_THREADS": "1",  # each worker has one core; a fork has no other thread
}
FLAGS = (
    *("--skip-tokenizer-init", "--enforce-eager"),
    *("--dtype", "float32", "--max-model-len", "4096", "--generation-config", "vllm"),
    *("--host", "127.0.0.1", "--kv-cache-memory-bytes", str(KV_BYTES)),
)


def environment(cores: str) -> dict[str, str]:
    """That of a server whose workers have a core each."""
    return {**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": cores}


class ForkedServer(Forked):
    """As `Forked`, of what has imported vLLM."""

    imported = (
        "tests.e2e.vllm.serving",
        "kvbus.integrations.vllm.connector",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        ENTRY,
    )


@dataclass
class VllmServer:
    """One server, its files in a folder of its own: start it, ask it, end it."""

    model: Path
    folder: Path
    cores: str = "0"
    flags: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_path(self) -> Path:
        return self.folder / "log"

    @property
    def alive(self) -> bool:
        return self.guard is not None and self.guard.poll() is None

    def log(self) -> str:
        """All that it has written."""
        return self.log_path.read_text(errors="replace")

    def trouble(self) -> list[str]:
        """The warnings and errors in its log that name kvbus."""
        return [line for line in self.log().splitlines() if TROUBLE.search(line)]

    def launch(self) -> None:
        """Start the process, and do not wait for it.

        It is a process group of its own, but in the session of the test. Linux shares cores between
        sessions first (autogroups): where the workers of one vLLM spin on all cores, it can leave
        another session without any for minutes, and the two vLLM wait for each other.
        """
        self.folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", ForkedServer.imported[0]]
        command += ["--model", str(self.model), "--served-model-name", "model"]
        command += ["--port", str(self.port), *FLAGS, *self.flags]
        with self.log_path.open("ab") as log:
            self.guard = ForkedServer(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(self.cores),
            )

    def wait_started(self) -> None:
        """Return once it serves."""
        try:
            wait_until(lambda: self._healthy() or not self.alive, "healthy", STARTS_WITHIN_S)
            assert self.alive
        except AssertionError as error:
            error.add_note(f"the end of {self.log_path}:\n{self.log()[-TAIL_CHARS:]}")
            raise

    def stop(self) -> None:
        """End it and every process that it started; return when they are gone."""
        if self.guard is None or self.guard.stdin is None:
            return
        self.guard.stdin.close()
        self.guard.wait(ENDS_WITHIN_S)

    def begin(self, prompt: Sequence[int] | None, num_tokens: int, **fields: Any) -> Call:
        """Send a request and do not wait for what it answers; ``fields`` are vLLM's own."""
        return ask(self.port, prompt, num_tokens, **fields)

    def complete(self, prompt: Sequence[int], num_tokens: int, **fields: Any) -> Completion:
        """What it says after ``prompt``; raises `RefusedError` if it answers with an error."""
        return self.begin(prompt, num_tokens, **fields).completion()

    def metric(self, name: str, **labels: str) -> float:
        """The value of ``vllm:name`` on its metrics page, summed over the labels not given."""
        found = (s.value for s in self._samples(name) if labels.items() <= s.labels.items())
        return float(sum(found))

    def from_elsewhere(self) -> float:
        """Tokens of prompts that it counts as computed elsewhere."""
        return self.metric("prompt_tokens_by_source_total", source="external_kv_transfer")

    def blocks_in_use(self) -> int:
        """Blocks of KV that requests hold, by its own metrics; those only cached are free.

        The page is as of the last step, and an idle server makes none: a small request makes one.
        """
        for _ in self._samples("cache_config_info"):  # one for each data-parallel rank
            self.complete([1], 1)
        num_blocks = int(self._cache_config("num_gpu_blocks")) - 1  # one is the null block
        return round(self.metric("kv_cache_usage_perc") * num_blocks)

    def has_no_block_in_use(self) -> bool:
        return self.blocks_in_use() == 0

    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self._cache_config("block_size"))

    def pids(self, title: str) -> list[int]:
        """The processes of this server whose title has ``title`` in it."""
        assert self.guard is not None
        group = self.guard.pid
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                line = (process / "cmdline").read_bytes().decode(errors="replace")
                stat = (process / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat[2]) == group and title in line:
                found.append(int(process.name))
        return found

    def _healthy(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=ANSWERS_WITHIN_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _cache_config(self, name: str) -> str:
        (value,) = {config.labels[name] for config in self._samples("cache_config_info")}
        return str(value)

    def _samples(self, name: str) -> list[Any]:
        page = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(page, timeout=ANSWERS_WITHIN_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found = [s for family in families for s in family.samples if s.name == f"vllm:{name}"]
        assert found, f"no metric {name}"
        return found
