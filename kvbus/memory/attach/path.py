"""Owns the place of an attach socket in the file system: its lock, its file.

Refuses a path that Linux cannot hold, and to take the place of an agent that lives.
"""

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvbus.errors import ConfigError
from kvbus.memory.attach.folder import prepare_folder

MAX_PATH_BYTES = 107  # sun_path without its NUL
_BACKLOG = 64


@contextmanager
def listening_socket(path: Path) -> Iterator[socket.socket]:
    """Listen at the path with mode 0600, in a directory made with 0700; remove the file at the end.

    A lock file beside it, which the kernel unlocks when its owner dies, tells a dead agent's socket
    file, which is replaced, from a living one's. Raises ``ConfigError``.
    """
    check_path_length(path)
    prepare_folder(path.parent)
    with _lock(path), _bind(path) as listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def check_path_length(path: Path) -> None:
    """Raise ``ConfigError`` for a path that does not fit into a socket address."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise ConfigError(
            f"attach path {path} has {num_bytes} bytes; Linux allows {MAX_PATH_BYTES}: choose a "
            "shorter runtime directory"
        )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    lock_path = path.with_name(path.name + ".lock")  # stays: removing it would race with its taker
    try:
        lock_file = lock_path.open("ab")
    except OSError as error:
        raise ConfigError(f"cannot make the lock file {lock_path}: {error.strerror}") from error
    with lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(path) from error
        yield


def _bind(path: Path) -> socket.socket:
    _remove_stale_file(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(0o600)  # nobody can connect before it listens
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {path}: {error.strerror}") from error
    return listener


def _remove_stale_file(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"attach path {path} is taken by a file that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        with suppress(ConnectionRefusedError):
            try:
                probe.connect(str(path))
            except BlockingIOError as error:  # it listens, and its queue is full
                raise _in_use(path) from error
            raise _in_use(path)
    path.unlink()


def _in_use(path: Path) -> ConfigError:
    return ConfigError(f"another agent is alive at {path}: stop it, or choose another path")
