"""An agent that an engine's process starts, and that ends with it.

engine ──starts──▶ keeper ──starts──▶ agent
   └── when it ends (pidfd), the keeper drains and stops the agent

A parent-death signal would fire when the starting thread ends. Ray kills a replica's children,
which would not drain, so the keeper is not a child of the engine.
"""

import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal

from kvbus.engine import query_agent
from kvbus.errors import PeerLost, RequestRefused
from kvbus.spawn import Child, write_agent_config

STARTS_WITHIN_S = 60.0
CHECK_S = 0.05
ENDED = "the agent has ended with status"
MAX_LOG_BYTES = 64 << 20
CHECK_LOG_S = 10.0


@dataclass(frozen=True, slots=True)
class KeptAgent:
    attach: Path
    peer: str
    server_key: str

    @classmethod
    def start(cls, role: str, host: str, settings: Mapping[str, Any]) -> "KeptAgent":
        """Block until the agent responds. Raises `PeerLost` with the end of its log."""
        folder = Path(tempfile.mkdtemp(prefix="kvbus-"))
        chosen = {
            "agent_id": f"{role}-{folder.name.removeprefix('kvbus-')}",
            "peer_bind": f"tcp://{host}:0",
            "events_bind": f"tcp://{host}:0",
        }
        attach = folder / "agent" / "attach.sock"
        own = {**chosen, **settings, "runtime_dir": str(attach.parent)}
        path = write_agent_config("agent", folder, **own)
        log = folder / "log"
        log.touch(mode=0o600)
        command = ["-m", __name__, str(os.getpid()), role, str(path), str(log)]
        if _start([sys.executable, *command], log) == 0:
            with start_blocking_portal() as portal:
                deadline = time.monotonic() + STARTS_WITHIN_S
                while time.monotonic() < deadline and ENDED.encode() not in log.read_bytes():
                    with suppress(PeerLost, RequestRefused):  # not yet up
                        welcome = portal.call(query_agent, attach)
                        return cls(attach, welcome.peer_endpoint, welcome.server_key)
                    time.sleep(CHECK_S)
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise PeerLost(
            f"the agent beside this process did not start; its log {log} ends with\n{tail}"
        )


def _start(command: list[str], log: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=files, setsid=True)
    return os.waitpid(pid, 0)[1]


def keep(parent: int, role: str, config: str, log: str) -> int:
    """Fork a process that runs the agent, and drains and stops it when ``parent`` ends."""
    watched = os.pidfd_open(parent)
    if os.fork():
        return 0
    command = [sys.executable, "-m", f"kvbus_{role}", config]
    with Child.start(f"{role} agent", command, log=Path(log)) as agent:
        ended = os.pidfd_open(agent.pid)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: agent.request_end())
        while not select.select([watched, ended], [], [], CHECK_LOG_S)[0]:
            bound_log(Path(log), MAX_LOG_BYTES)
        agent.request_end()
        status = agent.process.wait()
    if status == 0:
        shutil.rmtree(Path(config).parent)  # after a failure, its log is needed
    else:
        print(ENDED, status, flush=True)
    return status


def bound_log(log: Path, max_bytes: int) -> None:
    with suppress(OSError):  # a full disk or a removed log must not end the agent
        if log.stat().st_size > max_bytes:
            shutil.copyfile(log, log.with_name("log.1"))
            os.truncate(log, 0)


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), *sys.argv[2:5]))
