"""Runs probe processes: alone, or a pair of which one writes into the other's stdin.

Refuses to wait longer than the budget, and to leave a process behind: one that does not end is
killed. Only one that the kernel cannot end, as a driver holds it, is left to the kernel.
"""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from kvbus.spawn import Child, Stream

PROBE = "kvbus.doctor.process"
GENTLE_END_S = 1.0
KILLED_END_S = 1.0
LEAST_S = 0.05
MAX_REASON_LETTERS = 300
_UCX_ERROR = re.compile(r"UCX\s+ERROR\s+(.+)")
_NIXL_ERROR = re.compile(r"^E\d{4} \S+\s+\d+ \S+?:\d+\] (.+)", re.MULTILINE)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a probe ended: its stdout, its stderr, and why it failed, empty when it did not."""

    output: str
    log: str
    failure: str

    def answer(self, kind: type[T], nothing: T) -> tuple[T, str]:
        """What it printed, or ``nothing`` and why."""
        if self.failure:
            return nothing, self.failure
        try:
            return msgspec.json.decode(self.output, type=kind), ""
        except msgspec.DecodeError:
            return nothing, "it answered something else"


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
    with _started(module, *arguments, env=env) as probe:
        return _result(probe, budget.next_s())


def run_pair(module: str, *arguments: str, env: Mapping[str, str], budget: Budget) -> Ended:
    """Run ``module target`` into ``module reader``; how the reader ended, or the target's failure.

    The target goes on until its stdin ends, which it does when the reader is done.
    """
    limit_s = budget.next_s()
    with _started(module, *arguments, "target", env=env) as target:
        # It stays open here, too: the target's line may come after a reader that has failed.
        line = target.process.stdout
        with _started(module, *arguments, "reader", env=env, stdin=line) as reader:
            ended = _result(reader, limit_s)
            # A reader that was too slow has no status yet; its target then fails for want of it.
            if reader.process.returncode and (status := _end(target)):
                return replace(ended, failure=_why(status, target.log_text()))
            return ended


@contextlib.contextmanager
def _started(
    *arguments: str, env: Mapping[str, str], stdin: Stream = subprocess.PIPE
) -> Iterator[Child]:
    with tempfile.TemporaryDirectory(prefix="kvbus-doctor-") as folder:
        command, log = [sys.executable, "-m", *arguments], Path(folder, "log")
        pipe = subprocess.PIPE
        probe = Child.start("probe", command, log=log, stdin=stdin, stdout=pipe, env=env)
        try:
            yield probe
        except BaseException:
            probe.process.kill()
            raise
        finally:
            _end(probe)


def _result(probe: Child, limit_s: float) -> Ended:
    """Its end, in time or by force."""
    try:
        output, _ = probe.process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        probe.process.kill()
        failure = f"no answer within {limit_s:.3g} s; --timeout gives more"
        return Ended("", probe.log_text(), failure)
    log, status = probe.log_text(), probe.process.returncode
    return Ended(output.decode(errors="replace"), log, _why(status, log) if status else "")


def _end(probe: Child) -> int | None:
    """Its status; one that is told by its stdin may clean up. None: it had to be killed."""
    probe.ask_to_end()
    try:
        return probe.process.wait(GENTLE_END_S)
    except subprocess.TimeoutExpired:
        probe.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver
            probe.process.wait(KILLED_END_S)
        return None
    finally:
        _close_stdout(probe)


def _close_stdout(probe: Child) -> None:
    if probe.process.stdout is not None:
        probe.process.stdout.close()


def _why(status: int, log: str) -> str:
    reason = reason_in(log)
    if status < 0:
        ending = f"killed by {signal.Signals(-status).name}"
        return f"{ending}: {reason}" if reason else ending
    return reason or f"ended with status {status}"


def reason_in(log: str) -> str:
    """The first error that UCX told, or else NIXL, or else the last line, which is Python's."""
    for pattern in (_UCX_ERROR, _NIXL_ERROR):
        if found := pattern.search(log):
            return found[1].strip()[:MAX_REASON_LETTERS]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:MAX_REASON_LETTERS] if lines else ""
