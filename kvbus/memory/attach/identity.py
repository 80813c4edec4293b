"""Owns who is at the other end of a Unix socket, as the kernel says it."""

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from kvbus.errors import ConfigError

_CREDENTIALS = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The process as it was when it connected, or when it began to listen."""

    pid: int
    uid: int
    gid: int

    @classmethod
    def of(cls, connected: socket.socket) -> "PeerIdentity":
        """Who is at the other end."""
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return cls(*_CREDENTIALS.unpack(credentials))


def check_agent(connected: socket.socket, path: Path) -> None:
    """Raise ``ConfigError`` unless who listens at ``path`` is of this user.

    Not of root either: an agent attaches processes of its own user only, so one of root that would
    take this process is none.
    """
    agent = PeerIdentity.of(connected)
    if agent.uid != os.geteuid():
        raise ConfigError(
            f"who listens at {path} is of uid {agent.uid} (pid {agent.pid}), not of ours "
            f"({os.geteuid()}): no memory is passed; run both as one user, and look who made that "
            "socket",
            uid=agent.uid,
            pid=agent.pid,
        )
