"""An agent beside an engine's process is gone when that is, however it has ended."""

import signal
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

IMPORT = "from kvbus.integrations.keeper import KeptAgent"
STARTER = f"""
import sys, threading, time
{IMPORT}
def start():
    agent = KeptAgent.start("prefill", "127.0.0.1", {{"slice_bytes": 4096}})
    print(agent.peer, flush=True)
threading.Thread(target=start).start()
time.sleep(100)
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short name for the files of agents."""
    with tempfile.TemporaryDirectory(prefix="kk-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_agent_ends_with_process_that_started_it_in_thread(
    folder: Path, ending: signal.Signals
) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    try:
        peer = starter.stdout.readline().strip()
        alive = ask(peer, "status", {})["ok"]["role"]
        tasks = Path(f"/proc/{starter.pid}/task").glob("*/children")
        children = "".join(task.read_text() for task in tasks)
    finally:
        starter.send_signal(ending)
        starter.wait()
        starter.stdout.close()

    assert alive == "prefill"
    assert children == "", "who kills the children of the process does not kill the agent"
    wait_until(
        lambda: not list(folder.iterdir()), "the agent has ended well, and its files are gone"
    )


def test_an_agent_that_logs_little_starts_as_any_other(folder: Path) -> None:
    quiet = {"log_level": "error", "runtime_dir": "/nowhere"}
    start = f"agent = KeptAgent.start('decode', '127.0.0.1', {quiet})"
    ended = subprocess.run(
        [sys.executable, "-c", f"{IMPORT}; {start}; print(agent.attach.exists(), agent.peer)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert ended.stdout.startswith("True tcp://127.0.0.1:")
    wait_until(lambda: not list(folder.iterdir()), "it has ended with the process")


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
