"""Runs probe processes: alone, or a pair of which one writes into the other's stdin.

Refuses to wait longer than the budget, and to leave a process behind: one that does not end is
killed. Only one that the kernel cannot end, as a driver holds it, is left to the kernel.
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

from kvbus.doctor.check.logs import reason_in
from kvbus.doctor.probe.native import PARENT_KEY

GENTLE_END_S = 1.0
KILLED_END_S = 1.0
LEAST_S = 0.05


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
    with _started([module, *arguments], env, subprocess.PIPE) as probe:
        return probe.result(budget.next_s())


def run_pair(module: str, *, env: Mapping[str, str], budget: Budget) -> Ended:
    """Run ``module target`` into ``module reader``; how the reader ended, or the target's failure.

    The target goes on until its stdin ends, which it does when the reader is done.
    """
    limit_s = budget.next_s()
    with (
        _started([module, "target"], env, subprocess.PIPE) as target,
        _started([module, "reader"], env, target.process.stdout) as reader,
    ):
        _close(target.process.stdout)  # the reader has it
        ended = reader.result(limit_s)
        # A reader that was too slow has no status yet; its target then fails for want of it.
        if reader.process.returncode and (status := target.end()):
            return replace(ended, failure=_why(status, target.log_text()))
        return ended


@dataclass(frozen=True, slots=True)
class _RunningProbe:
    """A process; stderr goes to a file, as it may be long and nobody reads it meanwhile."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def result(self, limit_s: float) -> Ended:
        """Its end, in time or by force."""
        try:
            output, _ = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            failure = f"no answer within {limit_s:.3g} s; --timeout gives more"
            return Ended("", self.log_text(), failure)
        text, status = self.log_text(), self.process.returncode
        return Ended(output.decode(errors="replace"), text, _why(status, text) if status else "")

    def end(self) -> int | None:
        """Its status; one that is told by its stdin may clean up. None: it had to be killed."""
        _close(self.process.stdin)
        try:
            return self.process.wait(GENTLE_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver
                self.process.wait(KILLED_END_S)
            return None
        finally:
            _close(self.process.stdout)

    def log_text(self) -> str:
        """What it wrote to stderr until now."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


@contextlib.contextmanager
def _started(
    arguments: list[str], env: Mapping[str, str], stdin: int | IO[bytes] | None
) -> Iterator[_RunningProbe]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **env, PARENT_KEY: str(os.getpid())},
        )
        probe = _RunningProbe(process, log)
        try:
            yield probe
        except BaseException:
            process.kill()
            raise
        finally:
            probe.end()


def _why(status: int, log: str) -> str:
    reason = reason_in(log)
    if status < 0:
        ending = f"killed by {signal.Signals(-status).name}"
        return f"{ending}: {reason}" if reason else ending
    return reason or f"ended with status {status}"


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(OSError):
            pipe.close()
