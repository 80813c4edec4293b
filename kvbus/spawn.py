"""Child processes that never outlive this process."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import anyio

from kvbus.errors import ConfigError, LocalError, PeerLost
from kvbus.variables import PREFIX

END_TIMEOUT_S = 10.0
NUM_TAIL_LINES = 8
ANY_PORT = "tcp://127.0.0.1:0"
LOWEST_PORT, NUM_PORT_TRIES = 10_000, 100
PORTS_OF_CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_GIVEN_PORTS: set[int] = set()

#     this process ──fork──▶ launcher ──exec──▶ the program
#                            1. requests SIGKILL for the end of its parent; this survives the exec
#                            2. exits if its parent ended before step 1
#
# The kernel's parent is a thread, so only the main thread may start a child. Python ignores SIGPIPE
# and SIGXFSZ, and an exec would inherit that.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("who started this process has ended")
for number in signal.SIGPIPE, signal.SIGXFSZ:
    signal.signal(number, signal.SIG_DFL)
os.execvp(sys.argv[2], sys.argv[2:])
"""

Stream = int | IO[Any] | None


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    _log_start_bytes: int

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        env: Mapping[str, str] | None = None,
        own_session: bool = False,
    ) -> "Child":
        """The child's stderr, and by default its stdout, go to ``log``.

        ``env`` is added to this environment, without `KVBUS_…`. ``own_session`` detaches the child
        from the terminal's Ctrl-C. Raises `ConfigError`.
        """
        if threading.current_thread() is not threading.main_thread():
            raise LocalError(
                "a child ends with the thread that starts it: start it in the main thread"
            )
        if shutil.which(command[0]) is None:
            raise ConfigError(f"cannot start the {name}: there is no program {command[0]}")
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        try:
            with log.open("ab") as output:
                start_bytes = output.tell()
                process = subprocess.Popen(
                    [*launcher, *command],
                    stdin=stdin,
                    stdout=output if stdout is None else stdout,
                    stderr=output,
                    env={**_inherited(), **(env or {})},
                    start_new_session=own_session,
                )
                return cls(name, process, log, start_bytes)
        except OSError as error:
            raise ConfigError(f"cannot start the {name} with the log {log}: {error}") from error

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def log_text(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._log_start_bytes)
            return log.read().decode(errors="replace")

    def cpu_s(self) -> float:
        """Return CPU seconds with its children; 0 after its end."""
        return sum(map(cpu_s, (self.pid, *_children(self.pid))))

    def lost(self, if_alive: str = "does not answer") -> PeerLost:
        ending = if_alive if self.is_alive else _how_ended(self.process.returncode)
        lines = self.log_text().splitlines()[-NUM_TAIL_LINES:]
        tail = "\n".join(f"  {line}" for line in lines) or "  (none)"
        return PeerLost(
            f"the {self.name} (process {self.pid}) {ending}; the last lines of its log:\n{tail}"
        )

    def request_end(self) -> None:
        """Close its stdin pipe, or send SIGTERM; resume a stopped process."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it exited without reading all
                self.process.stdin.close()
        elif self.is_alive:
            self.process.terminate()
        if self.is_alive:
            self.process.send_signal(signal.SIGCONT)

    def end(self, within_s: float = END_TIMEOUT_S) -> int:
        self.request_end()
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(END_TIMEOUT_S)
            return -signal.SIGKILL  # blocked in a driver
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()

    async def ended(self) -> int:
        if self.is_alive:
            fd = os.pidfd_open(self.pid)
            try:
                await anyio.wait_readable(fd)
            finally:
                os.close(fd)
        return self.process.wait()

    async def end_async(self, within_s: float = END_TIMEOUT_S) -> int:
        """Runs to its end even if cancelled."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.end, within_s)
        return self.process.wait()


def _inherited() -> dict[str, str]:
    """Without `KVBUS_…`: this may be an agent's container."""
    return {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}


def _how_ended(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


def cpu_s(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lists = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for one in lists for child in one.read_text(encoding="ascii").split()]
    return []


def write_agent_config(name: str, folder: Path, **settings: str | float | list[str]) -> Path:
    values = {
        "agent_id": name,
        "peer_bind": ANY_PORT,
        "events_bind": ANY_PORT,
        "runtime_dir": str(folder / name),
        **settings,
    }
    path = folder / f"{name}.toml"
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    path.write_text("".join(lines), encoding="utf-8")
    return path


def never_give(ports: Iterable[int]) -> None:
    _GIVEN_PORTS.update(ports)


def free_port() -> int:
    """Return a free TCP port of loopback outside the ephemeral range. Raises `OSError`."""
    lowest_of_clients = int(PORTS_OF_CLIENTS.read_text(encoding="ascii").split()[0])
    ports = range(LOWEST_PORT, max(lowest_of_clients, LOWEST_PORT + NUM_PORT_TRIES))
    for _ in range(NUM_PORT_TRIES):
        port = secrets.choice(ports)
        if port in _GIVEN_PORTS:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _GIVEN_PORTS.add(port)
            return port
    raise OSError(f"no free port from {LOWEST_PORT} to {lowest_of_clients}")
