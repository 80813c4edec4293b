"""TCP sockets at which this process listens."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)


# Linux lists the sockets of the whole machine, so only the process's own descriptors are used.
def listening_sockets() -> Iterator[tuple[str, int]]:
    for path in Path("/proc/self/fd").iterdir():
        number = int(path.name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            duplicate = os.dup(number)
            try:
                one = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                raise
            with one:
                is_tcp = one.family in _IP_FAMILIES and one.type == socket.SOCK_STREAM
                if is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    host, port, *_ = one.getsockname()
                    yield host.partition("%")[0], port
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOTSOCK):  # closed or reused meanwhile
                raise
