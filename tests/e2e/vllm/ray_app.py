"""A Ray cluster of several raylets that serves P/D with kvbus: run as a program, told what to do.

Reads commands from a file, a JSON object a line, and writes what came of each to another. A node
has room for replicas of one side only, so that to end a node is to end these.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.llm import LLMConfig

from kvbus.integrations.ray import build_pd_openai_app
from tests.e2e.vllm.guard import adopt_orphans, descendants

STORE_BYTES = 80 << 20
GONE_WITHIN_S = 60.0
AGENT = {
    "insecure": True,  # all nodes are this machine
    "data_interfaces": ["lo"],
}
OF_SIDE = {"agent": {"mapped": False}}  # as two machines do it


class RayApp:
    """The cluster, and what is served there."""

    def __init__(self, model: str, http_port: int) -> None:
        self._model, self._http_port = model, http_port
        head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}

    def start(self) -> None:
        """Nodes for both sides, and Ray Serve, whose proxy is on the head."""
        for side in ("prefill", "decode"):
            self.add_node(side)
        ray.init(address=self._cluster.address, log_to_driver=True)
        serve.start(http_options={"host": "127.0.0.1", "port": self._http_port})

    def add_node(self, side: str) -> None:
        """A node with room for some replicas of a side: an update starts new before it ends old."""
        self._nodes[side] = self._cluster.add_node(
            num_cpus=8, resources={side: 4}, object_store_memory=STORE_BYTES
        )

    def kill_node(self, side: str) -> None:
        """End a node as a machine that fails does."""
        self._cluster.remove_node(self._nodes.pop(side), allow_graceful=False)

    def serve(self, prefill: int = 1, decode: int = 1) -> None:
        """So many replicas of each side; returns when they serve."""
        sides = {"prefill": prefill, "decode": decode}
        configs = {f"{side}_config": self._config(side, n) for side, n in sides.items()}
        serve.run(build_pd_openai_app(configs, agent=AGENT), route_prefix="/")

    def end(self) -> list[str]:
        """End everything; the command lines of what is left after a while."""
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()
        deadline = time.monotonic() + GONE_WITHIN_S
        while (left := command_lines()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _config(self, side: str, num_replicas: int) -> LLMConfig:
        return LLMConfig(
            model_loading_config={"model_id": "model", "model_source": self._model},
            deployment_config={"num_replicas": num_replicas, "health_check_timeout_s": 60},
            placement_group_config={"bundles": [{"CPU": 1, side: 1}]},
            log_engine_metrics=False,
            engine_kwargs={
                "enforce_eager": True,
                "dtype": "float32",
                "max_model_len": 4096,
                "max_num_batched_tokens": 256,
                "kv_cache_memory_bytes": 128 << 20,
                "skip_tokenizer_init": True,
                "generation_config": "vllm",
                "kv_transfer_config": {
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": {"fetch_timeout_s": 20.0, **OF_SIDE},
                },
            },
        )


def command_lines() -> list[str]:
    """Of all processes below this one."""
    lines = []
    for pid in descendants():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            lines.append(line)
        else:
            reap(pid)
    return lines


def reap(pid: int) -> None:
    """Those that we have adopted are ours to wait for."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # its own parent lives


def commands(path: Path) -> Iterator[dict[str, Any]]:
    """Each line of the file, as it comes."""
    with path.open() as file:
        while True:
            line = file.readline()
            if line.endswith("\n"):
                yield json.loads(line)
            else:
                time.sleep(0.05)


def main(model: str, http_port: str, folder: str) -> None:
    """Do as told, until told to end."""
    adopt_orphans()
    app = RayApp(model, int(http_port))
    answers = (Path(folder) / "answers").open("a")
    for command in commands(Path(folder) / "commands"):
        name = command.pop("do")
        try:
            answer = {"ok": getattr(app, name)(**command)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if name == "end":
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
