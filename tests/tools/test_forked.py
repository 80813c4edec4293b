"""An agent from the fork server is a process as any that pytest starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.agents import AgentProcess, Agents, wait_until
from tests.support.forked import Forked

SIGNALS = ("SigBlk", "SigIgn", "SigCgt")
STARTS_AND_DIES = """
import os, signal, sys
from pathlib import Path
from tests.support.agents import Agents
agents = Agents(Path(sys.argv[1]))
agents.start(agents.prepare("prefill"))
print(agents.all[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def state(pid: int, *names: str) -> list[str]:
    """What the kernel says of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    told = dict(line.split(":\t", 1) for line in lines)
    return [told[name] for name in names]


@pytest.fixture
def agent(fresh: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentProcess:
    """An agent that was started in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    fresh.start(fresh.prepare("prefill"))
    return fresh.all[0]


def test_agent_is_child_of_pytest_in_its_folder_and_gets_signals(
    agent: AgentProcess, tmp_path: Path
) -> None:
    process = Path(f"/proc/{agent.pid}")
    standard = [(process / "fd" / str(fd)).readlink() for fd in (0, 1, 2)]
    folder, parent = (process / "cwd").readlink(), state(agent.pid, "PPid")[0]
    session = os.getsid(agent.pid)
    agent.signal(signal.SIGSTOP)
    stopped = state(agent.pid, "State")
    agent.signal(signal.SIGCONT)
    agent.signal(signal.SIGTERM)

    assert (int(parent), session) == (os.getpid(), os.getsid(0))
    assert standard == [Path(os.devnull), agent.log_path, agent.log_path]
    assert folder == tmp_path
    assert stopped == ["T (stopped)"]
    assert agent.exit_status() == 0


def test_its_signals_are_those_of_a_new_python(tmp_path: Path) -> None:
    code = "import time; print('here', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as python:
        assert python.stdout is not None
        python.stdout.readline()
        new = state(python.pid, *SIGNALS)
        python.kill()
    config = tmp_path / "fifo"
    os.mkfifo(config)
    command = [sys.executable, "-m", "kvbus_prefill", str(config)]
    with (
        (tmp_path / "log").open("wb") as log,
        Forked(command, stderr=log, env=os.environ) as forked,
    ):
        with config.open("w"):  # it reads its configuration
            seen = state(forked.pid, *SIGNALS)
        forked.kill()

    assert seen == new


def test_it_ends_with_a_process_that_is_killed(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STARTS_AND_DIES, str(folder)],
        stdout=subprocess.PIPE,
        check=False,
    )
    pid = int(ended.stdout)

    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the agent has ended")
    assert ended.returncode == -signal.SIGKILL
