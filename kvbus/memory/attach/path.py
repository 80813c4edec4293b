"""Owns the place of an attach socket in the file system: its lock, its file.

A path that Linux cannot hold is refused, and so is the place of an agent that lives.
"""

import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from kvbus.errors import ConfigError
from kvbus.memory.attach.folder import prepare_folder

MAX_PATH_BYTES = 107  # sun_path without its NUL
_BACKLOG = 64
ENGINE_SOCKET = "engine.sock"
"""In the folder of the attach socket; ZeroMQ binds it."""


class AttachPlace:
    """A socket that listens at a path, and the lock beside it; given back at the end of ``with``.

    The agent's other socket in that folder is its own as well, by the same lock.
    """

    def __init__(self, path: Path, listener: socket.socket, lock: IO[bytes]) -> None:
        self.path, self.listener, self._lock = path, listener, lock

    @classmethod
    def take(cls, path: Path) -> Self:
        """Listen at the path with mode 0600, in a directory made with 0700.

        A lock file beside it, which the kernel unlocks when its owners are dead, tells a dead
        agent's socket file, which is replaced, from a living one's. Raises ``ConfigError``.
        """
        check_path_length(path)
        prepare_folder(path.parent)
        lock = lock_file(path.with_name(path.name + ".lock"))
        if lock is None:
            raise _in_use(path)
        try:
            return cls(path, _bind(path), lock)
        except BaseException:
            lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Listen no more, and remove the files; ZeroMQ leaves its own behind."""
        with self._lock, self.listener:
            self.path.unlink(missing_ok=True)
            self.path.with_name(ENGINE_SOCKET).unlink(missing_ok=True)


def check_path_length(path: Path) -> None:
    """Raise ``ConfigError`` for a path that does not fit into a socket address."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise ConfigError(
            f"attach path {path} has {num_bytes} bytes; Linux allows {MAX_PATH_BYTES}: choose a "
            "shorter runtime directory"
        )


def lock_file(path: Path) -> IO[bytes] | None:
    """The file at the path, made and locked until it is closed; None when another has the lock.

    It stays when it is closed: removing it would race with who takes it next.
    """
    try:
        opened = path.open("ab")
    except OSError as error:
        raise ConfigError(f"cannot make the lock file {path}: {error.strerror}") from error
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        opened.close()
        return None
    return opened


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
