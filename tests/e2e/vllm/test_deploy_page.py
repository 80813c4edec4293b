"""The commands of docs/vllm.md, run in order on two hosts, which are network namespaces."""

import configparser
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvbus.spawn import Child
from tests.e2e.vllm import deploy_page
from tests.e2e.vllm.deploy_page import HOSTS, ROOT, Command
from tests.e2e.vllm.servers import (
    ENDS_WITHIN_S,
    KV_BYTES,
    NETWORK,
    STARTS_WITHIN_S,
    ForkedServer,
    environment,
)
from tests.support.agents import AgentProcess, Agents, agents_ended, wait_until
from tests.support.namespaces import BRIDGED, HAVE_NAMESPACES, Host, bridged

BIN = Path(sys.executable).parent
RUNS_WITHIN_S = 100.0
NOT_MAPPED = "mapped = false\n"
"""Both hosts are one machine: without this, KV would not go over the network."""
ON_CPUS = (
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"),
    *("--kv-cache-memory-bytes", str(KV_BYTES)),
)
CORES = {"prefill": "0", "decode": "1"}
OF_MACHINE = re.compile(r"(?<![\w.])/(?:etc|opt|run|usr|var)/")


@dataclass
class Deployment:
    """What the page has set up so far; all its files are below ``agents.folder``."""

    hosts: dict[str, Host]
    agents: Agents
    model: Path
    keys: dict[str, str] = field(default_factory=dict)
    """Public keys by their placeholder."""
    servers: dict[str, ForkedServer] = field(default_factory=dict)
    routers: list[Child] = field(default_factory=list)
    printed: list[tuple[Command, str]] = field(default_factory=list)

    def at(self, host: str) -> Path:
        return self.agents.folder / host

    def here(self, host: str, text: str) -> str:
        """Return a text of the page with this test's paths, users and addresses."""
        at = self.at(host)
        table = {
            "python3 -m venv /opt/kvbus": "mkdir -p /opt/kvbus",
            "-o kvbus ": "",
            f"journalctl -u kvbus-{host}@0 -o cat": f"cat {at}/log",
            "/opt/kvbus/bin": str(BIN),
            "/opt/kvbus/src": str(ROOT),
            "/opt/kvbus": f"{at}/opt",
            "/etc/kvbus": f"{at}/etc",
            "/etc/systemd/system": f"{at}/units",
            "/run/kvbus": f"{at}/run",
            "eth0": BRIDGED,
            "MODEL": str(self.model),
            **{address: self.hosts[name].address for address, name in HOSTS.items()},
            **self.keys,
        }
        for on_page, made in table.items():
            text = text.replace(on_page, made)
        return text

    def run(self, command: Command) -> None:
        runs: dict[tuple[str, ...], Callable[[Command], None]] = {
            deploy_page.SHELL: self.run_shell,
            deploy_page.STARTS_AGENT: self.start_agent,
            deploy_page.STOPS_AGENT: self.stop_agent,
            deploy_page.SERVES: self.serve,
            deploy_page.ROUTES: self.route,
            deploy_page.NOT_RUN: lambda _: None,
        }
        (run,) = (run for beginnings, run in runs.items() if command.begins(beginnings))
        run(command)

    def run_shell(self, command: Command) -> None:
        text = self.here(command.host, command.text)
        rest = text.replace(str(BIN), "").replace(str(ROOT), "")
        assert not OF_MACHINE.search(rest), f"would touch files of this machine: {text}"
        ended = subprocess.run(
            [*self.hosts[command.host].command, "bash", "-o", "pipefail", "-c", text],
            capture_output=True,
            text=True,
            check=False,
            timeout=RUNS_WITHIN_S,
        )
        assert ended.returncode == 0, f"{text}\n{ended.stdout}{ended.stderr}"
        self.printed.append((command, ended.stdout))
        if "keys new" in command.text:
            self.keys[f"{command.host.upper()}_KEY"] = ended.stdout.strip()

    def start_agent(self, command: Command) -> None:
        """Start what the unit starts, in the folder that systemd would create."""
        host, at = command.host, self.at(command.host)
        service = self.unit(host)
        Path(self.here(host, f"/run/{service['RuntimeDirectory']}")).mkdir(0o700, parents=True)
        config = at / "etc" / f"{host}-0.toml"
        config.write_text(config.read_text() + NOT_MAPPED)
        agent = AgentProcess(host, at, at / "log", {})
        agent.process = Child.start(
            f"{host} agent",
            [*self.hosts[host].command, *shlex.split(self.here(host, service["ExecStart"]))],
            log=agent.log_path,
            env={"UCX_TLS": "tcp"},
        )
        self.agents.all.append(agent)
        if service["CPUSchedulingPolicy"] == "rr":
            with suppress(PermissionError):
                os.sched_setscheduler(agent.pid, os.SCHED_RR, os.sched_param(1))
        agent.wait_started()

    def unit(self, host: str) -> dict[str, str]:
        """Return the section of the service, as the page has installed it."""
        unit = configparser.RawConfigParser(strict=False)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read(self.at(host) / "units" / f"kvbus-{host}@.service")
        return {key: text.replace("%i", "0") for key, text in unit["Service"].items()}

    def serve(self, command: Command) -> None:
        """Start vLLM, and do not wait for it: the other one starts at the same time."""
        host = command.host
        words = deploy_page.words(self.here(host, command.text))
        with (self.at(host) / "vllm.log").open("ab") as log:
            self.servers[host] = ForkedServer(
                [sys.executable, "-m", ForkedServer.imported[0], "--model", *words[2:], *ON_CPUS],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={
                    **environment(CORES[host]),
                    NETWORK: self.hosts[host].name,
                    "VLLM_HOST_IP": self.hosts[host].address,  # else that of the default route
                },
            )

    def route(self, command: Command) -> None:
        for name, server in self.servers.items():
            url = f"http://{self.hosts[name].address}:8100/health"
            wait_healthy(url, server, self.at(name) / "vllm.log")
        host = self.hosts[command.host]
        words = deploy_page.words(self.here(command.host, command.text))
        log = self.at(command.host) / "router.log"
        router = Child.start("router", [*host.command, *words], log=log)
        self.routers.append(router)
        wait_healthy(f"http://{host.address}:8000/health", router.process, log)

    def stop_agent(self, command: Command) -> None:
        self.stop_engines()
        (agent,) = (agent for agent in self.agents.all if agent.role == command.host)
        agent.request_end()
        assert agent.exit_status() == 0

    def stop_engines(self) -> None:
        """Stop the router and then vLLM, as the page says."""
        for router in self.routers:
            router.end()
        for server in self.servers.values():
            assert server.stdin is not None
            server.stdin.close()
            server.wait(ENDS_WITHIN_S)

    def output_of(self, beginning: str) -> str:
        (text,) = (text for command, text in self.printed if command.begins((beginning,)))
        return text


def wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def is_healthy() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")
        with suppress(OSError), urllib.request.urlopen(url) as answer:  # noqa: S310
            return bool(answer.status == 200)
        return False

    wait_until(is_healthy, f"{url}: {log}", STARTS_WITHIN_S)


@pytest.fixture
def deployment(models: Path) -> Iterator[Deployment]:
    if not HAVE_NAMESPACES:
        pytest.skip("needs root and iproute2")
    with bridged(*HOSTS.values()) as hosts, agents_ended(Agents) as agents:
        made = Deployment(hosts, agents, models / "gqa")
        for host in hosts:
            (made.at(host) / "units").mkdir(parents=True)
        try:
            yield made
        finally:
            made.stop_engines()


def test_every_command_of_page_has_one_rule_and_every_rule_a_command() -> None:
    found = list(deploy_page.commands())
    rules = [*deploy_page.RULES]

    unlike = [one.text for one in found if sum(one.begins((rule,)) for rule in rules) != 1]
    unused = [rule for rule in rules if not any(one.begins((rule,)) for one in found)]

    assert deploy_page.kinds_of_code() == {"bash", "json", "text"}
    assert (unlike, unused) == ([], [])
    assert "insecure" not in deploy_page.PAGE.read_text("utf-8")


def test_commands_of_page_serve_a_request_by_a_handoff(deployment: Deployment) -> None:
    for command in deploy_page.commands():
        deployment.run(command)

    completion = json.loads(deployment.output_of("curl "))
    (line,) = deployment.output_of("journalctl ").splitlines()
    checks = [text for command, text in deployment.printed if " doctor " in command.text]
    assert completion["usage"]["completion_tokens"] == 8
    assert_like_page(json.loads(line))
    assert_status_like_page(deployment.output_of("/opt/kvbus/bin/kvbus status"))
    assert ["kvbus works on this machine" in text for text in checks] == [True, True]
    assert [agent.trouble() for agent in deployment.agents.all] == [[], []]


def assert_like_page(line: dict[str, object]) -> None:
    ((_, text),) = deploy_page.fenced("json")
    shown = json.loads(text)
    same = ("event", "stage", "attempts", "blocks_free", "path")
    assert shown.keys() <= line.keys()
    assert {key: line[key] for key in same} == {key: shown[key] for key in same}


def assert_status_like_page(printed: str) -> None:
    ((_, text),) = deploy_page.fenced("text")
    shown, rows = (
        {line.split()[0] for line in one.splitlines() if line.strip()} for one in (text, printed)
    )
    assert shown <= rows
    assert re.search(r"^ engine .* ready$", printed, re.MULTILINE)
