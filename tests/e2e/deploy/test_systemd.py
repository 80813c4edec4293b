"""The units of systemd: they are valid, and the agent reports what they wait for."""

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from kvbus.agent.config import AgentConfig
from tests.support.agents import WITHIN_S, AgentProcess, Agents, agents_ended, wait_until

UNITS = Path(__file__).parents[3] / "deploy" / "systemd"
ROLES = ("prefill", "decode")
WATCHDOG_S = 0.5
DENY_DEVICES = {"PrivateDevices", "ProtectClock", "DeviceAllow", "DevicePolicy"}
"""With these, a unit has no GPUs and no RDMA devices in some versions of systemd."""


@pytest.fixture
def supervisor(folder: Path) -> Iterator[socket.socket]:
    """Stands for systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(folder / "notify"))
        sock.settimeout(WITHIN_S)
        yield sock


@pytest.fixture
def agent(supervisor: socket.socket) -> Iterator[AgentProcess]:
    env = {
        "NOTIFY_SOCKET": supervisor.getsockname(),
        "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
    }
    with agents_ended(Agents) as agents:
        agents.start(started := agents.prepare("prefill", env=env))
        yield started


def hear(supervisor: socket.socket) -> str:
    return supervisor.recv(4096).decode()


def heard_until_quiet(supervisor: socket.socket) -> Iterator[str]:
    with suppress(TimeoutError):
        while True:
            yield hear(supervisor)


def test_an_agent_reports_its_start_its_life_and_its_end(
    supervisor: socket.socket, agent: AgentProcess
) -> None:
    assert [hear(supervisor) for _ in range(4)] == ["READY=1", *["WATCHDOG=1"] * 3]
    assert agent.says("agent.started")
    agent.signal(signal.SIGTERM)
    heard = iter(lambda: hear(supervisor), "STOPPING=1")
    assert set(heard) <= {"WATCHDOG=1"}
    assert agent.exit_status() == 0


def test_an_agent_whose_loop_stands_still_is_not_reported_alive(
    supervisor: socket.socket, agent: AgentProcess
) -> None:
    while hear(supervisor) != "WATCHDOG=1":
        pass
    agent.signal(signal.SIGSTOP)
    supervisor.settimeout(2 * WATCHDOG_S)
    assert sum(1 for _ in heard_until_quiet(supervisor)) < 5
    agent.signal(signal.SIGCONT)
    supervisor.settimeout(WITHIN_S)
    assert hear(supervisor) == "WATCHDOG=1"


def test_an_agent_works_without_the_supervisor_that_it_was_told_of(folder: Path) -> None:
    with agents_ended(Agents) as agents:
        agent = agents.prepare("prefill", env={"NOTIFY_SOCKET": str(folder / "nowhere")})
        agents.start(agent)
        assert agent.says("supervisor.silent", state="READY=1")
        wait_until(agent.idle, "it answers")


@pytest.mark.parametrize("role", ROLES)
def test_units_are_valid(role: str, tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("needs systemd-analyze: make debian-packages")
    text = (UNITS / f"kvbus-{role}@.service").read_text()
    here = text.replace("/opt/kvbus/bin", str(Path(sys.executable).parent))
    unit = tmp_path / f"kvbus-{role}@0.service"
    unit.write_text(here.replace("User=kvbus", "User=root"))

    command = [analyze, "verify", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("role", ROLES)
def test_units_start_the_agent_of_their_name_and_give_it_time_to_drain(role: str) -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(UNITS / f"kvbus-{role}@.service")
    service = unit["Service"]
    fields = msgspec.structs.fields(AgentConfig)
    (drain_timeout_s,) = [one.default for one in fields if one.name == "drain_timeout_s"]
    program, config, *options = service["ExecStart"].split()
    assert program == f"/opt/kvbus/bin/kvbus-{role}"
    assert config == f"/etc/kvbus/{role}-%i.toml"
    assert options == ["--set", f"runtime_dir=/run/{service['RuntimeDirectory']}"]
    assert float(service["TimeoutStopSec"]) > drain_timeout_s + 10
    assert not DENY_DEVICES & service.keys()
