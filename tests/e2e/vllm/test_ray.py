"""Ray Serve with kvbus on several raylets: served, a node lost, replicas that come and go."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvbus.spawn import free_port
from tests.e2e.vllm.calls import RefusedError, ask
from tests.e2e.vllm.models import VOCABULARY
from tests.e2e.vllm.servers import ENVIRONMENT, VllmServer
from tests.support.agents import wait_until
from tests.support.plain_sockets import ask as plain_ask

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here"),
    pytest.mark.filterwarnings("ignore"),  # of Ray's own imports
]

DOES_WITHIN_S = 400.0
NUM_TOKENS = 6
FAILED = (RefusedError, OSError, HTTPException)
HERE = Path(__file__)
PROMPTS = {
    name: random.Random(seed).choices(range(3, VOCABULARY), k=length)
    for seed, (name, length) in enumerate({"short": 300, "long": 3000, "last": 700}.items())
}


@dataclass
class RayServe:
    """The cluster's process, the folder of its agents, and what each prompt is answered with."""

    folder: Path
    port: int
    expected: dict[str, list[int]]
    guard: subprocess.Popen[bytes]
    num_answers: int = 0
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4))

    def do(self, name: str, **arguments: Any) -> Any:
        """Have the cluster do something, and return what came of it."""
        with (self.folder / "commands").open("a") as commands:
            commands.write(json.dumps({"do": name, **arguments}) + "\n")
        answers = self.folder / "answers"

        def is_done() -> bool:
            assert self.guard.poll() is None or name == "end", self.log()
            return answers.read_text().count("\n") > self.num_answers

        wait_until(is_done, name, DOES_WITHIN_S)
        self.num_answers += 1
        answer = json.loads(answers.read_text().splitlines()[-1])
        assert "error" not in answer, f"{answer['error']}\n{self.log()}"
        return answer["ok"]

    def log(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-200:])

    def tokens(self, name: str) -> list[int]:
        return ask(self.port, PROMPTS[name], NUM_TOKENS).completion().tokens

    def agents(self, role: str) -> dict[Path, list[dict[str, Any]]]:
        """The log of each agent of a role that lives, or has failed."""
        logs = self.folder.glob("kvbus-*/log")
        lines = {path: [json.loads(x) for x in text_of(path) if x[:1] == "{"] for path in logs}
        return {p: some for p, some in lines.items() if some and some[0]["agent"].startswith(role)}

    def num_live(self, role: str, what: str) -> int:
        """What the agents of a role hold together."""
        peers = [line["peer"] for line in self.said(role, "agent.started")]
        return sum(plain_ask(peer, "status", {})["ok"]["counts"][what] for peer in peers)

    def works(self, name: str) -> bool:
        """Whether the prompt is answered, and right."""
        try:
            said = self.tokens(name)
        except FAILED:
            return False
        assert said == self.expected[name]
        return True

    def said(self, role: str, event: str) -> list[dict[str, Any]]:
        logs = self.agents(role).values()
        return [line for lines in logs for line in lines if line["event"] == event]


def wait_said(ray_serve: RayServe, role: str, event: str) -> list[dict[str, Any]]:
    """The lines of ``event``, as soon as there is one."""
    wait_until(lambda: ray_serve.said(role, event), f"{event} of {role}")
    return ray_serve.said(role, event)


def text_of(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except FileNotFoundError:  # it has ended meanwhile
        return []


def alone(model: Path, folder: Path) -> dict[str, list[int]]:
    """What one vLLM by itself says after each prompt."""
    server = VllmServer(model, folder)
    server.launch()
    try:
        server.wait_started()
        return {name: server.complete(one, NUM_TOKENS).tokens for name, one in PROMPTS.items()}
    finally:
        server.stop()


@contextmanager
def started(model: Path, expected: dict[str, list[int]]) -> Iterator[RayServe]:
    folder = Path(tempfile.mkdtemp(prefix="kr-"))  # short, as sockets lie in it
    for name in ("commands", "answers", "log"):
        (folder / name).touch()
    port = free_port()
    app = HERE.with_name("ray_app.py")
    guard = HERE.with_name("guard.py")
    command = [sys.executable, str(guard), sys.executable, str(app), str(model), str(port)]
    root = str(HERE.parents[3])
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [*command, str(folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            process_group=0,
            env={
                **os.environ,
                **ENVIRONMENT,
                "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
                "TMPDIR": str(folder),
                "RAY_USAGE_STATS_ENABLED": "0",
            },
        )
    try:
        yield RayServe(folder, port, expected, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def ray_serve(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServe]:
    """A cluster that serves with a replica of each side."""
    model = models / "gqa"
    expected = alone(model, tmp_path_factory.mktemp("alone"))
    with started(model, expected) as ray_serve:
        ray_serve.do("start")
        ray_serve.do("serve")
        yield ray_serve


def test_config_shared_by_both_sides_is_copied_and_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.serve.llm import LLMConfig

    from kvbus.integrations import ray

    monkeypatch.setattr(ray, "ray_build_pd_openai_app", lambda args: args)
    sides = ("prefill_config", "decode_config")
    model = {"model_id": "m", "model_source": "/m"}
    shared: dict[str, Any] = {"kv_transfer_config": {"kv_connector_extra_config": {}}}
    configs = {side: LLMConfig(model_loading_config=model, engine_kwargs=shared) for side in sides}

    built = ray.build_pd_openai_app(configs)

    roles = [built[side].engine_kwargs["kv_transfer_config"]["kv_role"] for side in sides]
    assert roles == ["kv_producer", "kv_consumer"]
    assert shared == {"kv_transfer_config": {"kv_connector_extra_config": {}}}


def test_requests_prefill_on_one_node_and_decode_on_another(ray_serve: RayServe) -> None:
    said = {name: ray_serve.tokens(name) for name in PROMPTS}

    read = {line["request_id"] for line in wait_said(ray_serve, "decode", "handoff.completed")}
    offered = {line["request_id"] for line in wait_said(ray_serve, "prefill", "offer.released")}
    assert said == ray_serve.expected
    assert read & offered
    assert sum(line["num_bytes"] for line in ray_serve.said("decode", "handoff.completed")) > 0


def test_replicas_come_with_an_agent_each_and_go_with_it(ray_serve: RayServe) -> None:
    ray_serve.do("serve", prefill=1, decode=2)
    with_two = len(ray_serve.agents("decode"))
    answers = [ray_serve.threads.submit(ray_serve.tokens, "short") for _ in range(6)]
    said = [answer.result() for answer in answers]

    ray_serve.do("serve", prefill=1, decode=1)

    assert with_two == 2
    assert said == 6 * [ray_serve.expected["short"]]
    wait_until(lambda: len(ray_serve.agents("decode")) == 1, "the agent has gone", 60)
    assert ray_serve.tokens("last") == ray_serve.expected["last"]


def test_node_crash_during_handoff_costs_no_wrong_token(
    ray_serve: RayServe,
) -> None:
    answer = ray_serve.threads.submit(ray_serve.tokens, "long")
    wait_until(lambda: ray_serve.num_live("prefill", "leases"), "decode reads")
    ray_serve.do("kill_node", side="prefill")

    try:
        said = answer.result(DOES_WITHIN_S)
    except FAILED:
        said = ray_serve.expected["long"]  # an error is no wrong token
    wait_until(lambda: not ray_serve.num_live("decode", "fetches"), "decode holds nothing", 60)
    wait_until(lambda: not ray_serve.agents("prefill"), "the agent ended with its replica", 60)
    ray_serve.do("add_node", side="prefill")

    assert said == ray_serve.expected["long"]
    wait_until(lambda: ray_serve.works("last"), "the new node serves", DOES_WITHIN_S)


def test_nothing_is_left_when_the_cluster_has_ended(ray_serve: RayServe) -> None:
    assert ray_serve.do("end") == []
    assert not list(ray_serve.folder.glob("kvbus-*")), "agents that ended well leave no files"
