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
subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True).wait()
"""


@pytest.mark.parametrize("parent", ["stays", "ends"])
def test_all_end_with_the_process_that_started_the_guard_though_it_is_killed(
    tmp_path: Path, parent: str
) -> None:
    note = tmp_path / "pid"
    command = [sys.executable, str(GUARD), sys.executable, "-c", LEAVES_HOME, str(note), parent]
    with subprocess.Popen([sys.executable, "-c", HOLDS_GUARD, *command]) as holder:
        wait_until(note.exists, "a process has left its parents")

        os.kill(holder.pid, signal.SIGKILL)

    wait_until(lambda: not Path(f"/proc/{note.read_text()}").exists(), "it has ended")
