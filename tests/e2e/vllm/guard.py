"""Runs one command, and ends it with all that it started when its standard input ends.

Refuses to leave anything behind: processes that lose their parent become children of this one, so
they are found whatever became of those between. It ends, too, when the test process is killed, as
its input is a pipe from there. Run as a program, without the packages of the tests.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
ENDS_BY_ITSELF_WITHIN_S = 15.0


def prctl(option: int, value: int) -> None:
    """Set an option of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> set[int]:
    """All processes below this one, those that are dead and not waited for included."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)] = int(after_name[1])
    found: set[int] = set()
    below = {os.getpid()}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below} - found
        found |= below
    return found


def end_all() -> None:
    """Kill all descendants, those included that start meanwhile, and wait for their ends."""
    while True:
        for pid in descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def watch(pid: int) -> None:
    """Wait until this child ends, or the input does; then end all."""
    pidfd = os.pidfd_open(pid)
    select.select([sys.stdin, pidfd], [], [])
    os.kill(pid, signal.SIGTERM)
    select.select([pidfd], [], [], ENDS_BY_ITSELF_WITHIN_S)
    end_all()


if __name__ == "__main__":
    adopt_orphans()
    watch(subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL).pid)
