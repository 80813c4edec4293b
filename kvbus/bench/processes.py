"""Child processes of the benchmark: Python modules that live as long as their ``with`` block.

Refuses to leave one behind: who does not end when told is killed.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

END_TIMEOUT_S = 10.0
LOWEST_PORT, NUM_PORT_TRIES = 10_000, 100
PORTS_OF_CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_GIVEN: set[int] = set()


@contextlib.contextmanager
def running(
    module: str, *arguments: str, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``python -m module`` with pipes for its stdin and stdout, its stderr into ``log``."""
    with contextlib.ExitStack() as stack:
        stderr = stack.enter_context(log.open("wb")) if log is not None else None
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        stack.callback(_end, process)
        yield process


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_first(pid: int) -> None:
    """Have a process that has just started run before all ordinary ones.

    Its threads to come inherit that. A niceness would not do: it counts among the processes of one
    session only. Raises `PermissionError` for a user who may not.
    """
    os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now, for a server that starts later.

    Not one of those that the system gives to clients meanwhile, nor one that this process had
    before. Raises `OSError`.
    """
    lowest_of_clients = int(PORTS_OF_CLIENTS.read_text(encoding="ascii").split()[0])
    ports = range(LOWEST_PORT, max(lowest_of_clients, LOWEST_PORT + NUM_PORT_TRIES))
    for _ in range(NUM_PORT_TRIES):
        port = secrets.choice(ports)
        if port in _GIVEN:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _GIVEN.add(port)
            return port
    raise OSError(f"no free port from {LOWEST_PORT} to {lowest_of_clients}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
