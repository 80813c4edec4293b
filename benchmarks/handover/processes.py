"""Process groups of the benchmark: whole servers with all their workers, and what CPU they use.

Refuses to leave one behind: a worker of vLLM outlives its parent and spins, so groups are killed.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbus.bench.processes import cpu_s

END_TIMEOUT_S = 15.0
LOG_TAIL_BYTES = 3000


@dataclass(frozen=True, slots=True)
class Group:
    """One server: the process that was started, and all that it started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def pids(self) -> list[int]:
        """Its processes that have not ended; its id is that of the first one."""
        return [pid for pid in _pids() if _group_and_state(pid) in _living(self.process.pid)]

    def cpu_s(self) -> float:
        """CPU seconds that all its processes have used."""
        return sum(cpu_s(pid) for pid in self.pids())

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """None of its processes runs meanwhile."""
        pids = self.pids()
        _signal(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(pids, signal.SIGCONT)

    def log_tail(self) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


@contextlib.contextmanager
def group(
    name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str]
) -> Iterator[Group]:
    """Run ``command`` in a process group of its own, output into ``log``; then end all of it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **env},
            process_group=0,
        )
    started = Group(name, process, log)
    try:
        yield started
    finally:
        _end(started)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _end(started: Group) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.process.pid, signal.SIGKILL)
    started.process.wait()
    deadline = time.monotonic() + END_TIMEOUT_S
    while left := started.pids():
        if time.monotonic() > deadline:
            raise SystemExit(f"error: processes {left} of {started.name} do not end; end them")
        time.sleep(0.05)


def _living(group_id: int) -> set[tuple[int, str]]:
    return {(group_id, state) for state in "RSDTt"}


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _group_and_state(pid: int) -> tuple[int, str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0, ""
    state, _parent, group_id = text.rpartition(")")[2].split()[:3]
    return int(group_id), state
