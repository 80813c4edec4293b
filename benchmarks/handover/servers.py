"""vLLM servers: how one is started, on which core, and when it is ready.

Refuses to know connectors: a server takes its ``--kv-transfer-config`` as it is given.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvbus.spawn import free_port

from .client import KEEP_ALIVE_S, Client, RequestFailed
from .processes import Group, group

START_TIMEOUT_S = 900.0
DTYPE = "bfloat16"
ANY_CORE = range(os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What all servers of a run have in common."""

    model: Path
    folder: Path
    kv_space_gib: int
    max_tokens: int
    arguments: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Server:
    """One vLLM server."""

    group: Group
    port: int
    core: int
    model: str

    def client(self) -> Client:
        """A new connection to it."""
        return Client(self.port, self.model)

    def worker_pids(self) -> list[int]:
        """The processes that run the model."""
        return [pid for pid in self.group.pids() if b"Worker" in _command_line(pid)]

    def spread(self) -> None:
        """The thread that runs the model on the server's own core, the worker's others on any."""
        for pid in self.worker_pids():
            for task in Path(f"/proc/{pid}/task").iterdir():
                own = int(task.name) == pid
                os.sched_setaffinity(int(task.name), {self.core} if own else ANY_CORE)


@contextlib.contextmanager
def starting(
    recipe: Recipe, name: str, *, core: int, kv_transfer_config: str | None
) -> Iterator[Server]:
    """Start a server bound to ``core``; `wait_ready` returns once it serves."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(recipe.model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--dtype", DTYPE]
    command += ["--max-model-len", str(recipe.max_tokens), *recipe.arguments]
    if kv_transfer_config is not None:
        command += ["--kv-transfer-config", kv_transfer_config]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(recipe.kv_space_gib),
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **recipe.env,
    }
    with group(name, command, log=recipe.folder / f"{name}.log", env=env) as started:
        yield Server(started, port, core, str(recipe.model))


def wait_ready(group: Group, client: Client) -> None:
    """Return once it answers; a server that ends, or takes too long, ends the benchmark."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _healthy(client):
        if group.process.poll() is not None:
            _give_up(group, f"ended with status {group.process.returncode}")
        if time.monotonic() > deadline:
            _give_up(group, f"does not serve after {START_TIMEOUT_S:.0f} s")
        time.sleep(0.2)


def _healthy(client: Client) -> bool:
    try:
        with contextlib.closing(client):
            client.get("/health")
    except (OSError, RequestFailed):
        return False
    return True


def _give_up(group: Group, what: str) -> None:
    where = f"its log is {group.log}, which ends:\n{group.log_tail()}"
    raise SystemExit(f"error: the server {group.name} {what}; {where}")


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
