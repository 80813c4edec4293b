"""The agent beside an engine's process: started by it, and ended with it, however that ends.

    engine ──starts──▶ keeper ──starts──▶ agent
       └── its end is seen by the keeper (pidfd), which has the agent drain and end

A child that only asks the kernel to be told of its parent's end would be told of that of the thread
that started it, and who starts engines does so in threads of its own, as Ray does. The keeper is no
child of the engine's process either: Ray kills these when a replica ends, and agents are to drain.
"""

import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbus.errors import PeerLost
from kvbus.spawn import Child, write_agent_config

STARTS_WITHIN_S = 60.0
LOOK_S = 0.05
STARTED = b'"event":"agent.started"'
ENDED = "the agent has ended with status"


@dataclass(frozen=True, slots=True)
class KeptAgent:
    """Where a started agent is; it ends with this process."""

    attach: Path
    peer: str
    server_key: str

    @classmethod
    def start(cls, role: str, host: str, settings: Mapping[str, Any]) -> "KeptAgent":
        """Start a prefill or decode agent that others reach at ``host``.

        ``settings`` are keys of its configuration, over those that are chosen here; a key in a
        section has its name before it, as ``transport.slice_bytes``. Raises
        `PeerLost` with the last lines of its log when it does not start.
        """
        folder = Path(tempfile.mkdtemp(prefix="kvbus-"))
        chosen = {
            "agent_id": f"{role}-{folder.name.removeprefix('kvbus-')}",
            "peer_bind": f"tcp://{host}:0",
            "events_bind": f"tcp://{host}:0",
            "log_format": "json",
        }
        path = write_agent_config("agent", folder, **{**chosen, **settings})
        log = folder / "log"
        log.touch(mode=0o600)
        command = ["-m", __name__, str(os.getpid()), role, str(path), str(log)]
        _start([sys.executable, *command], log)
        return cls._once_started(log)

    @classmethod
    def _once_started(cls, log: Path) -> "KeptAgent":
        deadline = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < deadline:
            text = log.read_bytes()
            for line in text.splitlines():
                if STARTED in line:
                    said = json.loads(line)
                    return cls(Path(said["attach"]), said["peer"], said["server_key"])
            if ENDED.encode() in text:
                break
            time.sleep(LOOK_S)
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise PeerLost(
            f"the agent beside this process did not start; its log {log} ends with\n{tail}"
        )


def _start(command: list[str], log: Path) -> None:
    """A process in a session of its own."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=files, setsid=True)
    os.waitpid(pid, 0)  # it leaves another one behind


def keep(parent: int, role: str, config: str, log: str) -> int:
    """Run the agent until it ends, or until the process ``parent`` has: then it drains and ends."""
    watched = os.pidfd_open(parent)
    if os.fork():
        return 0
    command = [sys.executable, "-m", f"kvbus_{role}", config]
    with Child.start(f"{role} agent", command, log=Path(log)) as agent:
        ended = os.pidfd_open(agent.pid)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: agent.ask_to_end())
        select.select([watched, ended], [], [])
        agent.ask_to_end()
        status = agent.process.wait()
    if status == 0:
        shutil.rmtree(Path(config).parent)  # where it failed, its log is wanted
    else:
        print(ENDED, status, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), *sys.argv[2:5]))
