"""The commands of docs/two-machines.md, run as they stand there, on hosts of a network."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvbus.spawn import Child
from tests.support.agents import AgentProcess, Agents, agents_ended
from tests.support.namespaces import BRIDGED, HAVE_NAMESPACES, Host, bridged

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[3] / "docs" / "two-machines.md"
ADDRESSES = {"10.0.0.1": "prefill", "10.0.0.2": "decode"}
NOT_MAPPED = "mapped = false\n"
"""These hosts are one machine, of which the agents would find out."""
ALL_EQUAL = "ok: 19 handoffs; all bytes of the first of each case are equal"
RUNS_WITHIN_S = 100.0
INSTALLED = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""A PATH with the commands of the kvbus that is tested."""


@dataclass
class Page:
    """The page with the addresses of the test's hosts; all files are below ``folder``."""

    hosts: dict[str, Host]
    folder: Path
    keys: dict[str, str] = field(default_factory=dict)
    """Public keys by their placeholder."""

    def here(self, text: str) -> str:
        for address, name in ADDRESSES.items():
            inside = " ".join(self.hosts[name].command)
            text = text.replace(f"ssh {address}", inside)
            text = text.replace(address, self.hosts[name].address)
        return text.replace("eth0", BRIDGED).replace("/tmp/", f"{self.folder}/")  # noqa: S108 - the page's

    def blocks(self, kind: str) -> list[tuple[str, str]]:
        found = re.findall(rf"```{kind}\n# (.*?)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
        return [(title, text) for title, text in found]

    def run(self, where: str, command: str) -> str:
        name = ADDRESSES.get(where.removeprefix("on "), "router")
        for key, value in self.keys.items():
            command = command.replace(key, value)
        at = self.folder / name
        at.mkdir(exist_ok=True)
        ended = subprocess.run(
            [*self.hosts[name].command, "bash", "-o", "pipefail", "-c", self.here(command)],
            cwd=at,
            env={**os.environ, "PATH": INSTALLED},
            capture_output=True,
            text=True,
            check=True,
            timeout=RUNS_WITHIN_S,
        )
        return ended.stdout

    def start(self, name: str, agents: Agents) -> None:
        config = next(text for title, text in self.blocks("toml") if title == f"{name}.toml")
        at = self.folder / name
        (at / f"{name}.toml").write_text(self.here(config) + NOT_MAPPED)
        agent = AgentProcess(name, at, at / "log", {}, {"UCX_TLS": "tcp", "PATH": INSTALLED})
        agents.all.append(agent)
        command = f"exec kvbus-{name} {name}.toml"
        agent.process = Child.start(
            name,
            [*self.hosts[name].command, "bash", "-c", f"cd {at} && {command}"],
            log=agent.log_path,
            env=agent.env,
        )
        agent.wait_started()


@pytest.fixture
def page() -> Iterator[Page]:
    if not HAVE_NAMESPACES:
        pytest.skip("needs root and iproute2")
    with bridged("prefill", "decode", "router") as made, agents_ended(Agents) as agents:
        page = Page(made, agents.folder)
        new, trust = page.blocks("bash")[:2], page.blocks("bash")[2:4]
        printed = [page.run(*block).split()[-1] for block in new]
        page.keys |= zip(("PREFILL_KEY", "DECODE_KEY"), printed, strict=True)
        for block in trust:
            page.run(*block)
        for name in ADDRESSES.values():
            page.start(name, agents)
        yield page


def test_page_of_two_machines_works_on_two_and_three_hosts(page: Page) -> None:
    handoffs = page.blocks("bash")[4:6]
    said = [page.run(*block) for block in handoffs]
    assert [where for where, _ in handoffs] == ["on 10.0.0.2", "on a third machine"]
    assert all(ALL_EQUAL in one for one in said), said
    assert not any("mapped" in one for one in said)


def test_trusted_key_gets_doctor_and_trace_as_page_says(page: Page) -> None:
    doctor, (where, ask) = page.blocks("sh")
    page.run(*page.blocks("bash")[4])
    log = (page.folder / "decode" / "log").read_text("utf-8")
    first, *_ = re.findall(r'"request_id":"(\w+)".*"handoff.completed"', log)
    said = page.run(*doctor)
    shown = page.run(where, ask.replace("REQUEST_ID", first))
    assert "kvbus works on this machine" in said
    assert "each agent trusts the key of the other" in said
    assert "prefill-0" in shown
    assert "READ" in shown


def test_handoffs_between_two_hosts_are_measured_as_page_says(page: Page) -> None:
    where, command = page.blocks("bash")[6]
    less = command.replace("bench-prefill", "bench-prefill --mib 2 --rounds 1")
    said = page.run(where, less)
    assert (where, less.count("--mib")) == ("on 10.0.0.2", 1)
    assert "first handoff" in said
    cases = {line.partition(":")[0] for line in said.splitlines()}
    assert cases >= {"one-block", "runs-16k", "in-order"}
    assert "mapped" not in said
