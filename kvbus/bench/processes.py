"""The processes of the benchmark: agents, the prefill engine, a bare NIXL pair; each ends here."""

import contextlib
import http.client
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from kvbus.errors import KVBusError
from kvbus.planning import Descriptors

BARE_PAIR = "kvbus.transport.bare_pair"
LAG_BUCKET = "kvbus_event_loop_lag_seconds_bucket"
LOG_TAIL_BYTES = 2000
ANSWER_TIMEOUT_S = 120.0
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


async def ask(process: subprocess.Popen[bytes], line: str) -> str:
    """The line with which a child answers this one; raises `KVBusError` when it ended."""
    with anyio.move_on_after(ANSWER_TIMEOUT_S):
        return await anyio.to_thread.run_sync(_ask, process, line, abandon_on_cancel=True)
    raise KVBusError(f"no answer from process {process.pid} within {ANSWER_TIMEOUT_S:g} s")


def tell(process: subprocess.Popen[bytes], what: bytes) -> None:
    """Write to a child's stdin; raises `KVBusError` when it ended."""
    try:
        if process.stdin is not None:
            process.stdin.write(what)
            process.stdin.flush()
    except OSError as error:
        raise KVBusError(f"process {process.pid} of the benchmark ended") from error


def hear(process: subprocess.Popen[bytes]) -> bytes:
    """The next line of a child; raises `KVBusError` when it ended."""
    line = process.stdout.readline() if process.stdout else b""
    if not line:
        raise KVBusError(f"process {process.pid} of the benchmark ended")
    return line


def _ask(process: subprocess.Popen[bytes], line: str) -> str:
    tell(process, line.encode() + b"\n")
    return hear(process).decode()


@dataclass(frozen=True, slots=True)
class BenchAgent:
    """One agent process with the default configuration."""

    role: str
    pid: int
    attach_path: Path
    metrics_port: int
    log: Path

    def lag_counts(self) -> dict[float, float]:
        """Its histogram of event loop lag: cumulative counts by upper bound in seconds."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        return {
            float(sample.labels["le"]): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == LAG_BUCKET
        }

    def log_tail(self) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


@contextlib.contextmanager
def agent(role: str, folder: Path, *, path: str = "") -> Iterator[BenchAgent]:
    """Start the ``role`` agent below ``folder``; a decode agent reads by ``path``, if given."""
    port, name = free_port(), f"{role}-{path or 'auto'}"
    runtime, log, config = (folder / f"{name}{end}" for end in ("", ".log", ".toml"))
    config.write_text(
        (f'path = "{path}"\n' if path else "") + f'agent_id = "{name}-bench"\n'
        'peer_bind = "tcp://127.0.0.1:0"\n'
        'events_bind = "tcp://127.0.0.1:0"\n'
        f'runtime_dir = "{runtime}"\n'
        f'metrics_bind = "127.0.0.1:{port}"\n',
        encoding="utf-8",
    )
    with running(f"kvbus_{role}", str(config), log=log) as process:
        yield BenchAgent(role, process.pid, runtime / "attach.sock", port, log)


@dataclass(frozen=True, slots=True)
class BarePair:
    """The baseline: bare NIXL between two processes that sleep unless they are asked."""

    target: subprocess.Popen[bytes]
    reader: subprocess.Popen[bytes]

    async def read_s(self, command: str = "read") -> float:
        """Seconds of one READ; of ``verify`` too, which fails for wrong bytes."""
        tell(self.target, b"d")
        try:
            return float(await ask(self.reader, command))
        finally:
            tell(self.target, b"r")


@contextlib.contextmanager
def bare_pair(rows: Descriptors, size_bytes: int, folder: Path) -> Iterator[BarePair]:
    """Start both processes, with memory of ``size_bytes`` each; ``rows`` are offsets into it."""
    path, size = folder / "rows.npz", str(size_bytes)
    np.savez(path, local=rows.local, remote=rows.remote)
    with (
        running(BARE_PAIR, "target", size, log=folder / "raw.log") as target,
        running(BARE_PAIR, "reader", size, str(path)) as reader,
    ):
        tell(reader, hear(target))
        yield BarePair(target, reader)


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
