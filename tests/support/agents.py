"""Agents as real processes, observed by their logs, metrics pages and sockets.

This module must not import torch or NIXL.
"""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, ClassVar, TypeVar

import anyio
from prometheus_client.parser import text_string_to_metric_families

from kvbus.protocol import REQUESTS
from kvbus.spawn import Child, free_port
from tests.support.forked import Forked, can_fork
from tests.support.plain_sockets import Curve, ask

WITHIN_S = 30.0
STARTS_WITHIN_S = 90.0
ENDS_WITHIN_S = 15.0
LOG_PERIOD_S = 0.01
UCX_FATAL = re.compile(r"^\[.*\] .* Fatal: |^={4,}|^\s*\d+\s.*\+0x")
"""Lines of UCX before it aborts its process."""
OF_ALL_REQUESTS = frozenset(
    ["malformed", "invalid", "unknown_op", "too_large", "busy", "forbidden", "closed", "internal"]
)
"""Codes of refusals that no request declares as its own."""

Settings = Mapping[str, Any]
NO_SETTINGS: Settings = {}


class NotInTimeError(AssertionError):
    """A condition did not hold before its deadline."""


async def until(condition: Callable[[], Any], within_s: float = WITHIN_S) -> None:
    """Return once ``condition`` holds, while the event loop runs on; fail at the deadline."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise NotInTimeError("the condition never held")
        await anyio.sleep(0.01)


def wait_until(condition: Callable[[], Any], what: str, within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise NotInTimeError(f"never: {what}")
        time.sleep(0.01)


def write_config(path: Path, settings: Settings) -> None:
    path.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in settings.items()))


@dataclass
class AgentProcess:
    """One agent and its folder; it can start again after its end."""

    role: str
    folder: Path
    log_path: Path
    settings: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    runner: tuple[str, ...] = ()
    runs_first: bool = False
    forks_in_runner: bool = False
    """Start it from a fork server in the runner: faster from the second start on."""
    curve: Curve | None = None
    process: Child | None = None
    started: dict[str, Any] = field(default_factory=dict)
    num_skipped: int = 0
    expected_trouble: set[str] = field(default_factory=set)
    peers_may_abort: bool = False
    """Whether a test has stopped it, killed it, or cut it off."""

    @property
    def attach(self) -> Path:
        return Path(self.started["attach"])

    @property
    def peer(self) -> str:
        return str(self.started["peer"])

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.is_alive

    @property
    def _running(self) -> Child:
        assert self.process is not None
        return self.process

    def launch(self) -> None:
        self.num_skipped = 0
        config = self.folder / "config.toml"
        write_config(config, self.settings)
        command = [*self.runner, sys.executable, "-m", f"kvbus_{self.role}", str(config)]
        outside = {key: text for key, text in os.environ.items() if not key.startswith("KVBUS_")}
        name, env = f"{self.role} agent", {**outside, **self.env}
        is_new = self.runner and not self.forks_in_runner
        if is_new or not can_fork(env, self.runner):
            self.process = Child.start(name, command, log=self.log_path, env=self.env)
        else:
            with self.log_path.open("ab") as log:
                start_bytes = log.tell()
                process = Forked(command, stdin=DEVNULL, stdout=log, stderr=log, env=env)
            self.process = Child(name, process, self.log_path, start_bytes)
        if self.runs_first:
            with suppress(PermissionError):  # then it shares the cores, and tests take longer
                os.sched_setscheduler(self._running.pid, os.SCHED_RR, os.sched_param(1))

    def wait_started(self) -> None:
        wait_logged(self._running, '"agent.started"', STARTS_WITHIN_S)
        self.started = self.says("agent.started")[-1]

    def start(self) -> None:
        self.launch()
        self.wait_started()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; its data process is stopped and continued with it."""
        if number in (signal.SIGSTOP, signal.SIGCONT) and (data_pid := self.data_pid):
            os.kill(data_pid, number)
        self._running.process.send_signal(number)
        if number is signal.SIGSTOP:
            self.peers_may_abort = True
            os.waitpid(self.pid, os.WUNTRACED)

    def kill(self) -> None:
        self.peers_may_abort = True
        self._running.process.kill()
        self._running.process.wait()

    def request_end(self) -> None:
        """Signal it, also when it is stopped; `end` follows."""
        if self.process is not None:
            self.process.request_end()

    def end(self) -> None:
        """Wait for its end, or make one."""
        if self.process is not None:
            self.process.end(ENDS_WITHIN_S)

    def exit_status(self) -> int:
        return self._running.process.wait(WITHIN_S)

    def skip_log(self) -> None:
        """Have its log begin here, for a test that comes after others."""
        self.num_skipped += len(self.lines())

    def lines(self) -> list[str]:
        text = self.process.log_text() if self.process is not None else ""
        return text[: text.rfind("\n") + 1].splitlines()[self.num_skipped :]

    def log(self) -> list[dict[str, Any]]:
        """The lines of its log; a line that is none comes as the event ``not json``."""
        return [_parsed(line) for line in self.lines()]

    def logged(self, event: str, **fields: object) -> list[dict[str, Any]]:
        wanted = {"event": event, **fields}
        return [one for one in self.log() if all(one.get(k) == v for k, v in wanted.items())]

    def says(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """`logged`, as soon as there is such a line: an agent tells its engine before its log."""
        wait_until(lambda: self.logged(event, **fields), f"{event} {fields} in {self.log_path}")
        return self.logged(event, **fields)

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, summed over the labels that are not given; 0 if it is missing."""
        self.status()  # it has counted then what it said before
        families = text_string_to_metric_families(self.page("/metrics")[1])
        samples = [s for family in families for s in family.samples if s.name == f"kvbus_{name}"]
        assert samples or labels, f"no metric {name}"
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def page(self, path: str, *, within_s: float = WITHIN_S, **headers: str) -> tuple[int, str]:
        asked = urllib.request.Request(f"http://{self.settings['http_bind']}{path}")
        if file := self.settings.get("http_token_file"):
            headers = {"Authorization": f"Bearer {Path(file).read_text().strip()}", **headers}
        for name, value in headers.items():
            asked.add_header(name, value)
        try:
            with urllib.request.urlopen(asked, timeout=within_s) as answer:  # noqa: S310
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def status(self, **asked: str) -> dict[str, Any]:
        answer: dict[str, Any] = ask(self.peer, "status", asked, curve=self.curve)["ok"]
        return answer

    def trace(self, **asked: str) -> list[dict[str, Any]]:
        answer: dict[str, Any] = ask(self.peer, "trace", asked, curve=self.curve)["ok"]
        spans: list[dict[str, Any]] = answer["spans"]
        return spans

    @property
    def data_pid(self) -> int:
        """Its data process; 0 while none runs."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for pid in map(int, children):
            with suppress(OSError):  # it has just been reaped
                if b"kvbus.data" in Path(f"/proc/{pid}/cmdline").read_bytes():  # empty: a zombie
                    return pid
        return 0

    def memory_maps(self, name: str) -> int:
        pids = [pid for pid in (self.pid, self.data_pid) if pid]
        maps = [Path(f"/proc/{pid}/maps").read_text().splitlines() for pid in pids]
        return sum(name in line for lines in maps for line in lines)

    def num_files(self, name: str) -> int:
        return sum(name in str(one.readlink()) for one in Path(f"/proc/{self.pid}/fd").iterdir())

    def idle(self) -> bool:
        return not any(self.status()["counts"].values())

    def trouble(self) -> list[dict[str, Any]]:
        """Lines that no test should cause: errors, tracebacks, and what is not JSON."""
        lines = [line for line in self.log() if line["event"] not in self.expected_trouble]
        return [
            line
            for line in lines
            if line["event"] == "not json"
            or line.get("level") in ("error", "critical")
            or "exception" in line
            or (line["event"] == "request.refused" and not is_declared(line["op"], line["code"]))
        ]


def is_abort_by_ucx(line: Mapping[str, Any]) -> bool:
    """Whether UCX ended a data process, as it may when another agent is stopped or killed."""
    if line["event"] == "data.ended":
        return "SIGABRT" in line["reason"]
    return bool(UCX_FATAL.search(line.get("text", "")))


def is_declared(op: str, code: str) -> bool:
    named = [kinds[op] for kinds in REQUESTS.values() if op in kinds]
    return code in OF_ALL_REQUESTS or any(code in kind.refusals for kind in named)


def wait_logged(child: Child, text: str, within_s: float) -> None:
    """Return once its log has ``text``; raises `PeerLost` when it ends before, or is slow."""
    deadline = time.monotonic() + within_s
    while text not in child.log_text():
        if not child.is_alive or time.monotonic() > deadline:
            raise child.lost(f"did not log {text!r} within {within_s:g} s")
        time.sleep(LOG_PERIOD_S)


def _parsed(line: str) -> dict[str, Any]:
    with suppress(json.JSONDecodeError):
        if isinstance(parsed := json.loads(line), dict):
            return parsed
    return {"event": "not json", "text": line}


class Agents:
    """All agents of one fixture; they end with it. ``defaults`` are settings by role."""

    defaults: ClassVar[Mapping[str, Settings]] = {}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[AgentProcess] = []

    def prepare(self, role: str, *, env: Mapping[str, str] | None = None, **settings: Any) -> Any:
        """An agent that is not started yet; its folder's name is short, as sockets lie in it."""
        number = len(self.all)
        folder = self.folder / str(number)
        folder.mkdir(mode=0o700)
        defaults = {
            "agent_id": f"{role}-{number}",
            "peer_bind": f"tcp://127.0.0.1:{free_port()}",
            "events_bind": f"tcp://127.0.0.1:{free_port()}",
            "runtime_dir": str(folder / "run"),
            "http_bind": f"127.0.0.1:{free_port()}",
            "heartbeat_s": 0.2,
            "engine_wait_s": 0.0,  # an unknown engine is refused without waiting
        }
        if role == "decode":
            defaults["mapped"] = False  # most tests are about what two machines do as well
        settings = {**defaults, **self.defaults.get(role, {}), **settings}
        self.all.append(AgentProcess(role, folder, folder / "log", settings, dict(env or {})))
        return self.all[-1]

    def both(
        self, prefill: Settings = NO_SETTINGS, decode: Settings = NO_SETTINGS, **common: Any
    ) -> tuple[AgentProcess, AgentProcess]:
        """Start one agent of each role."""
        made = (
            self.prepare("prefill", **common, **prefill),
            self.prepare("decode", **common, **decode),
        )
        self.start(*made)
        return made

    def start(self, *wanted: AgentProcess) -> None:
        for agent in wanted:
            agent.launch()
        for agent in wanted:
            agent.wait_started()

    def check(self) -> None:
        for agent in self.all:
            if agent.alive:
                wait_until(agent.idle, f"{agent.role} agent holds nothing: {agent.status()}")
        trouble = [line for agent in self.all for line in agent.trouble()]
        if any(agent.peers_may_abort for agent in self.all):
            trouble = [line for line in trouble if not is_abort_by_ucx(line)]
        assert not trouble, trouble  # pytest shows no values here

    def end(self) -> None:
        """End all agents, also stopped and hung ones."""
        for agent in self.all:
            agent.request_end()
        for agent in self.all:
            agent.end()


A = TypeVar("A", bound=Agents)


@contextmanager
def agents_ended(kind: type[A]) -> Iterator[A]:
    """Agents in a folder with a short path, as Linux allows 107 bytes for a Unix socket's."""
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    agents = kind(folder)
    try:
        yield agents
    finally:
        agents.end()
        shutil.rmtree(folder)


@contextmanager
def started(*roles: str, **settings: Any) -> Iterator[Agents]:
    with agents_ended(Agents) as agents:
        agents.start(*(agents.prepare(role, **settings) for role in roles))
        yield agents
