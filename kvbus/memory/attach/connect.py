"""Owns how a process connects to an agent's Unix socket: at once, and to its own user only.

Refuses to wait, and who listens as another user.
"""

import socket
from pathlib import Path

from kvbus.errors import ConfigError, ErrorCode, PeerLost, RequestRefused
from kvbus.memory.attach.identity import check_agent
from kvbus.memory.attach.path import check_path_length


def connect_to_agent(path: Path) -> socket.socket:
    """Connect without waiting, and see who listens, before anything is sent.

    Raises ``PeerLost`` when nobody listens there, ``RequestRefused`` (busy) when there is a full
    queue and ``ConfigError`` when who listens is of another user.
    """
    check_path_length(path)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.setblocking(False)
    try:
        connected.connect(str(path))
    except BlockingIOError as error:
        connected.close()
        raise RequestRefused(f"the agent at {path} is busy", code=ErrorCode.BUSY) from error
    except OSError as error:
        connected.close()
        raise PeerLost(f"no agent at {path}: {error.strerror}") from error
    try:
        check_agent(connected, path)
    except ConfigError:
        connected.close()
        raise
    return connected
