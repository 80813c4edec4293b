"""SGLang servers as real processes, seen as their users see them: HTTP, metrics, log.

SGLang is not imported here: that takes seconds. Two packages that have no build for CPUs have
stand-ins in `stubs`, of which nothing is ever called.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvbus.spawn import free_port
from tests.support.agents import wait_until

STARTS_WITHIN_S = 300.0
ENDS_WITHIN_S = 40.0
ANSWERS_WITHIN_S = 120.0
TAIL_CHARS = 6000
ROOT = Path(__file__).parents[3]
STUBS = Path(__file__).with_name("stubs")
READY = "The server is fired up and ready to roll!"
TROUBLE = re.compile("(WARNING|ERROR).*kvbus", re.IGNORECASE)
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--skip-tokenizer-init", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--host", "127.0.0.1", "--max-total-tokens", "4096", "--context-length", "2048"),
    *("--max-running-requests", "8", "--enable-metrics", "--served-model-name", "model"),
)


class RefusedError(Exception):
    """A server answered with an error."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status


@dataclass
class Call:
    """A request that was sent."""

    connection: HTTPConnection

    def answer(self) -> dict[str, Any]:
        """All that the server says; raises `RefusedError`."""
        try:
            response = self.connection.getresponse()
            body = response.read().decode(errors="replace")
        finally:
            self.connection.close()
        if response.status != 200:
            raise RefusedError(response.status, body)
        answer: dict[str, Any] = json.loads(body)
        if "output_ids" not in answer:
            raise RefusedError(200, body)
        return answer

    def tokens(self) -> list[int]:
        """The tokens of the whole answer; raises `RefusedError`."""
        tokens: list[int] = self.answer()["output_ids"]
        return tokens

    def abort(self) -> None:
        """Hang up, as a client that gives up does."""
        self.connection.close()


def ask(port: int, prompt: Sequence[int], num_tokens: int, **fields: Any) -> Call:
    """Send a request to a server, or to a router before some; ``fields`` are SGLang's own."""
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    asked = {"input_ids": list(prompt), "sampling_params": sampling, **fields}
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWERS_WITHIN_S)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection.request("POST", "/generate", json.dumps(asked), headers)
    return Call(connection)


@dataclass
class SglangServer:
    """One server, its files in a folder of its own: start it, ask it, end it."""

    model: Path
    folder: Path
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
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
        """Start the process, and do not wait for it; it ends with all that it started."""
        self.folder.mkdir(exist_ok=True)
        command = [sys.executable, str(ROOT / "tests/e2e/vllm/guard.py")]
        command += [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += ["--port", str(self.port), *FLAGS, *self.flags]
        paths = [str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, **ENVIRONMENT, **self.env, "PYTHONPATH": os.pathsep.join(paths)}
        with self.log_path.open("ab") as log:
            self.guard = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env
            )

    def wait_started(self) -> None:
        """Return once it serves."""
        try:
            wait_until(lambda: READY in self.log() or not self.alive, "ready", STARTS_WITHIN_S)
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

    def begin(self, prompt: Sequence[int], num_tokens: int, **fields: Any) -> Call:
        """Send a request and do not wait for what it answers; ``fields`` are SGLang's own."""
        return ask(self.port, prompt, num_tokens, **fields)

    def generate(self, prompt: Sequence[int], num_tokens: int, **fields: Any) -> list[int]:
        """The tokens after ``prompt``; raises `RefusedError`."""
        return self.begin(prompt, num_tokens, **fields).tokens()

    def post(self, path: str, fields: Mapping[str, Any]) -> int:
        """The status of the answer to ``fields``, sent to ``path``."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=ANSWERS_WITHIN_S)
        try:
            connection.request(
                "POST", path, json.dumps(fields), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            response.read()
        except (OSError, HTTPException):
            return 0
        finally:
            connection.close()
        return response.status

    def metric(self, name: str) -> float:
        """The value of ``sglang:name`` on its metrics page, summed over labels."""
        page = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(page, timeout=ANSWERS_WITHIN_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found = [s for family in families for s in family.samples if s.name == f"sglang:{name}"]
        return float(sum(sample.value for sample in found))
