"""An agent beside an engine's process ends with that, even if it is killed."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.errors import PeerLost
from kvbus.integrations.keeper import KeptAgent, bound_log
from tests.support.agents import wait_until
from tests.support.plain_sockets import ask

STARTER = """
import sys, threading, time
from kvbus.integrations.keeper import KeptAgent
def start():
    quiet = {"slice_bytes": 4096, "log_level": "error", "runtime_dir": "/nowhere"}
    agent = KeptAgent.start("prefill", "127.0.0.1", quiet)
    assert agent.attach.exists()
    print(agent.peer, flush=True)
threading.Thread(target=start).start()
time.sleep(100)
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kk-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def test_quiet_agent_ends_with_process_that_started_it_in_thread(folder: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    try:
        peer = starter.stdout.readline().strip()
        alive = ask(peer, "status", {})["ok"]["role"]
        tasks = Path(f"/proc/{starter.pid}/task").glob("*/children")
        children = "".join(task.read_text() for task in tasks)
    finally:
        starter.kill()
        starter.wait()
        starter.stdout.close()

    assert alive == "prefill"
    assert children == "", "a kill of all children of the process spares the agent"
    wait_until(lambda: not list(folder.iterdir()), "the agent has ended, and its files are gone")


def test_a_long_log_is_begun_anew_and_whoever_writes_it_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"0123456789")
        bound_log(log, 10)
        writer.write(b"a")
        bound_log(log, 10)
        writer.write(b"b")

    assert (tmp_path / "log.1").read_bytes() == b"0123456789a"
    assert log.read_bytes() == b"b"


def test_an_agent_that_cannot_start_says_why_and_its_log_stays(folder: Path) -> None:
    with pytest.raises(PeerLost, match="key 'lease_s'"):
        KeptAgent.start("decode", "127.0.0.1", {"lease_s": -1})

    (files,) = folder.iterdir()
    assert "lease_s" in (files / "log").read_text()
