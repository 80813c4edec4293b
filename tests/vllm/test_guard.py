"""The guard leaves no process behind, wherever its command has put them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents import wait_until

GUARD = Path(__file__).with_name("guard.py")
LEAVES_HOME = """
import os, signal, sys, time
note, parent = sys.argv[1:]
if os.fork():
    while parent == "stays" or not os.path.exists(note):
        time.sleep(0.01)
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(note + ".part", "w") as part:
    part.write(str(os.getpid()))
os.rename(note + ".part", note)
while True:
    signal.pause()
"""
HOLDS_GUARD = """
import subprocess, sys
guarded = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
guarded.wait()
"""


def running(pid: int) -> bool:
    """Whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


def left(note: Path) -> int:
    """The process that has left its parents, once it has."""
    wait_until(note.exists, "it has started")
    return int(note.read_text())


@pytest.mark.parametrize("parent", ["stays", "ends"])
def test_a_process_that_has_left_its_parents_ends_with_the_guard(
    tmp_path: Path, parent: str
) -> None:
    command = [sys.executable, str(GUARD), sys.executable, "-c", LEAVES_HOME]
    note = tmp_path / "pid"
    with subprocess.Popen([*command, str(note), parent], stdin=subprocess.PIPE) as guard:
        pid = left(note)

        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait(30)

    assert not running(pid)


def test_all_end_when_the_process_that_started_the_guard_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(GUARD), sys.executable, "-c", LEAVES_HOME]
    note = tmp_path / "pid"
    holder = [sys.executable, "-c", HOLDS_GUARD, *command, str(note), "stays"]
    with subprocess.Popen(holder) as started:
        pid = left(note)

        os.kill(started.pid, signal.SIGKILL)

    wait_until(lambda: not running(pid), "it has ended")
