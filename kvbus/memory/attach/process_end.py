"""Whether the process at the other end of a connection is gone, and not only the connection.

Refuses to guess: a process that the kernel does not name here is never said to be gone.
"""

import os
import socket
from contextlib import suppress

import anyio

from kvbus.memory.attach.identity import PeerIdentity

_SO_PEERPIDFD = 77
"""Of Linux 6.5: it names processes of other namespaces, too."""


class ProcessEnd:
    """Open until `close`; made while the process lives."""

    def __init__(self, connected: socket.socket) -> None:
        self._fd: int | None = None
        with suppress(OSError):
            self._fd = _pidfd(connected)

    def close(self) -> None:
        """Look no more. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    async def wait(self) -> None:
        """Return once the process is gone; never, when the kernel cannot say so."""
        if self._fd is None:
            await anyio.sleep_forever()
        else:
            await anyio.wait_readable(self._fd)


def _pidfd(connected: socket.socket) -> int:
    """Raises `OSError`."""
    with suppress(OSError):
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    return os.pidfd_open(PeerIdentity.of(connected).pid)
