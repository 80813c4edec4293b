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
LAST_LINE = r"(?m)^ok: \d+ handoffs; all bytes of the first of each case are equal$"
"""The page shortens it."""
NOT_MAPPED = "mapped = false\n"
"""These hosts are one machine, of which the agents would find out."""
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
        name = ADDRESSES[where.removeprefix("on ")]
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
    with bridged("prefill", "decode") as made, agents_ended(Agents) as agents:
        page = Page(made, agents.folder)
        for block, key in zip(page.blocks("bash"), ("PREFILL_KEY", "DECODE_KEY", ""), strict=False):
            printed = page.run(*block).split()
            page.keys |= {key: printed[0]} if key else {}
        for name in ADDRESSES.values():
            page.start(name, agents)
        yield page


def test_keys_of_page_pass_doctor_between_two_hosts(page: Page) -> None:
    where, doctor = page.blocks("bash")[3]

    printed = page.run(where, doctor)

    assert where == "on 10.0.0.2"
    assert "each agent trusts the key of the other" in printed
    assert "kvbus works on this machine" in printed.splitlines()[-1]


def test_page_measures_handoffs_between_two_hosts(page: Page) -> None:
    (where, command) = page.blocks("bash")[-1]
    less = command.replace("bench-prefill", "bench-prefill --mib 1 --rounds 1")

    printed = page.run(where, less)

    assert where == "on 10.0.0.2"
    assert re.search(LAST_LINE, printed)
    assert {line.partition(":")[0] for line in printed.splitlines()} >= {"one-block", "in-order"}
    assert "mapped" not in printed
