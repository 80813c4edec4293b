"""Runs probe processes: alone, or a pair of which one writes into the other's stdin.

Refuses to wait longer than the budget, and to leave a process behind: who does not end is killed.
Only one that the kernel cannot end, as a driver holds it, is left to the kernel.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO

from kvbus.doctor.judge.logs import reason_in
from kvbus.doctor.probe.native import PARENT_KEY

GENTLE_END_S = 1.0
KILLED_END_S = 1.0
LEAST_S = 0.05

Process = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a probe ended: its stdout, its stderr, and why it failed, empty when it did not."""

    output: str
    log: str
    failure: str


class Budget:
    """Time that probes share: ``total_s`` for all of them, ``each_s`` for any one."""

    def __init__(self, total_s: float, each_s: float) -> None:
        self._ends_at = time.monotonic() + total_s
        self._each_s = each_s

    def next_s(self) -> float:
        """How long the next probe may take."""
        return max(LEAST_S, min(self._each_s, self._ends_at - time.monotonic()))


def run_alone(module: str, *arguments: str, env: Mapping[str, str], budget: Budget) -> Ended:
    """Run ``python -m module`` to its end, or to the end of its time."""
    limit_s = budget.next_s()
    with _log() as log, _started([module, *arguments], env, subprocess.PIPE, log) as process:
        return _result(process, log, limit_s)


def run_pair(module: str, *, env: Mapping[str, str], budget: Budget) -> Ended:
    """Run ``module target`` into ``module reader``; how the reader ended, or the target's failure.

    The target goes on until its stdin ends, which it does when the reader is done.
    """
    limit_s = budget.next_s()
    with (
        _log() as target_log,
        _log() as log,
        _started([module, "target"], env, subprocess.PIPE, target_log) as target,
        _started([module, "reader"], env, target.stdout, log) as reader,
    ):
        _close(target.stdout)  # the reader has it
        ended = _result(reader, log, limit_s)
        # A reader that was too slow has no status yet; its target then fails for want of it.
        if reader.returncode and (status := _end(target)):
            return replace(ended, failure=_why(status, _text(target_log)))
        return ended


def _result(process: Process, log: IO[bytes], limit_s: float) -> Ended:
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return Ended("", _text(log), f"no answer within {limit_s:.3g} s; --timeout gives more")
    text = _text(log)
    failure = _why(process.returncode, text) if process.returncode else ""
    return Ended(output.decode(errors="replace"), text, failure)


def _why(status: int, log: str) -> str:
    reason = reason_in(log)
    if status < 0:
        ending = f"killed by {signal.Signals(-status).name}"
        return f"{ending}: {reason}" if reason else ending
    return reason or f"ended with status {status}"


@contextlib.contextmanager
def _started(
    arguments: list[str], env: Mapping[str, str], stdin: int | IO[bytes] | None, log: IO[bytes]
) -> Iterator[Process]:
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=log,
        env={**os.environ, **env, PARENT_KEY: str(os.getpid())},
    )
    try:
        yield process
    except BaseException:
        process.kill()
        raise
    finally:
        _end(process)


def _end(process: Process) -> int | None:
    """Its status; one that is told by its stdin may clean up. None: it had to be killed."""
    _close(process.stdin)
    try:
        process.wait(GENTLE_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver: it ends with it
            process.wait(KILLED_END_S)
        return None
    finally:
        _close(process.stdout)
    return process.returncode


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(OSError):
            pipe.close()


def _log() -> IO[bytes]:
    """A file without a name: stderr may be long, and nobody reads it meanwhile."""
    return tempfile.TemporaryFile()


def _text(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")
